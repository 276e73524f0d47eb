"""The policy that a new ledger begins with. It takes effect as an event like every later one."""

from kite_schemas.policy import ArbitrationPolicy, ExpiryPolicy, Fleet, GuardPolicy, Policy, UpcyclePolicy, YocoPolicy

SECOND_US = 1_000_000


def policy() -> Policy:
    """Return the shipped policy: the numbers of the source documents, no pools.

    Two limits depend on the fleet and stay unset: `arbitration.concurrency_max` and `.injection_rate_max_milli`.
    """
    return Policy(
        rules=1,
        upcycle=UpcyclePolicy(
            weight_decay_ppm=930_000,
            weight_decay_pressure_ppm=710_000,
            weight_min_ppm=10_000,
            params_share_max_ppm=8_000,
            residual_max_ppm=50_000,
            blend_share_max_ppm=32_000,
            retention_us=120 * SECOND_US,
            retained_share_max_ppm=180_000,
            drift_interval_us=10 * SECOND_US,
        ),
        yoco=YocoPolicy(
            cold_start_deadline_us=417_000,
            start_backoff_us=5 * SECOND_US,
            start_backoff_max_us=300 * SECOND_US,
            reserve_bytes=1_800_000_000,
            reserve_pressure_ppm=230_000,
            prewarm_interval_us=120 * SECOND_US,
            prewarm_interval_critical_us=90 * SECOND_US,
            quarantine_us=60 * SECOND_US,
        ),
        arbitration=ArbitrationPolicy(
            idle_tick_us=SECOND_US,
            tick_us=100_000,
            sustained_us=5 * SECOND_US,
            miss_jump_ppm=150_000,
            fragmentation_max_ppm=350_000,
            hit_rate_min_ppm=820_000,
            latency_sigma_max_us=12_000,
            switch_window_us=137_000,
            idle_us=30 * SECOND_US,
            decision_deadline_us=17_000,
            sync_timeout_us=33_000,
            sync_timeout_reliable_us=87_000,
            loss_max_ppm=50_000,
            loss_windows=3,
        ),
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
            retire_us=60 * SECOND_US,
            delete_us=30 * SECOND_US,
            prewarm_us=300 * SECOND_US,
        ),
        fleet=Fleet(pools=()),
    )
