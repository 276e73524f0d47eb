"""The policy that a new ledger begins with. It takes effect as an event like every later one."""

from kite_schemas.policy import ArbitrationPolicy, ExpiryPolicy, Fleet, GuardPolicy, Policy, UpcyclePolicy, YocoPolicy

SECOND_US = 1_000_000


def policy() -> Policy:
    """Return the shipped policy: the numbers of the source documents, no pools."""
    return Policy(
        rules=1,
        upcycle=UpcyclePolicy(weight_decay_ppm=930_000, weight_min_ppm=10_000, params_share_max_ppm=8_000),
        yoco=YocoPolicy(
            cold_start_deadline_us=417_000,
            start_backoff_us=5 * SECOND_US,
            start_backoff_max_us=300 * SECOND_US,
        ),
        arbitration=ArbitrationPolicy(idle_tick_us=SECOND_US),
        guard=GuardPolicy(
            enabled=False,
            kl_max_micronats=320_000,
            freeze_us=15 * SECOND_US,
            interval_us=60 * SECOND_US,
        ),
        expiry=ExpiryPolicy(
            verify_us=30 * SECOND_US,
            blend_us=120 * SECOND_US,
            load_us=30 * SECOND_US,
            start_us=300 * SECOND_US,
            wake_us=10 * SECOND_US,
            drain_us=60 * SECOND_US,
            sleep_us=30 * SECOND_US,
            compare_us=30 * SECOND_US,
        ),
        fleet=Fleet(pools=()),
    )
