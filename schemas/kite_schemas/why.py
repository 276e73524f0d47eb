"""Why a decision was taken: what every decision carries, so that nobody has to guess afterwards."""

from enum import StrEnum

from pydantic import Field

from kite_schemas.model import Count, Data, Digest, EventId, Model, Name, Text, Us

RULES_MAX = 64
CANDIDATES_MAX = 256


class Reason(StrEnum):
    """Every reason the arbitrator can give, for what it does and for what it does not do."""

    ADAPTER_DUPLICATE = "adapter_duplicate"
    ADAPTER_REFUSED = "adapter_refused"
    AGREEMENT = "agreement"
    ALREADY_HOT = "already_hot"
    ANCHORS_LEAVE_NO_ROOM = "anchors_leave_no_room"
    ASKED = "asked"
    BACKED_OFF = "backed_off"
    BASE_UNKNOWN = "base_unknown"
    BLEND_BUSY = "blend_busy"
    BLEND_FAILED = "blend_failed"
    BLEND_OF_OTHER_BASE = "blend_of_other_base"
    BLEND_TOO_LARGE = "blend_too_large"
    CALM = "calm"
    CHANNEL_YOCO = "channel_yoco"
    DAMAGED = "damaged"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    DEGRADED = "degraded"
    DEMAND = "demand"
    DEVICE_BUSY = "device_busy"
    DRIFT = "drift"
    DRY_RUN = "dry_run"
    EFFECT_MISSING = "effect_missing"
    EFFECT_PROVEN = "effect_proven"
    EXPIRED = "expired"
    FREEZE_ENDING = "freeze_ending"
    FROZEN = "frozen"
    GAP = "gap"
    GAP_ACKNOWLEDGED = "gap_acknowledged"
    HEARD = "heard"
    IDLE = "idle"
    INITIAL = "initial"
    INPUT_ABSENT = "input_absent"
    INSTANCE_LOST = "instance_lost"
    INSTANCE_MISSING = "instance_missing"
    INSTANCE_UNKNOWN = "instance_unknown"
    INTERVAL = "interval"
    JITTER = "jitter"
    LAST_INSTANCE = "last_instance"
    LIMITS_KEPT = "limits_kept"
    LIMIT_CROSSED = "limit_crossed"
    LOAD_FAILED = "load_failed"
    LOSS = "loss"
    LOSSLESS = "lossless"
    MEMBER_UNKNOWN = "member_unknown"
    MEMORY = "memory"
    MODE_UNSUPPORTED = "mode_unsupported"
    NODE_LOST = "node_lost"
    NODE_REPLACED = "node_replaced"
    NOT_READY = "not_ready"
    NO_FORMER = "no_former"
    NO_PEER = "no_peer"
    NO_POLICY = "no_policy"
    NO_READY_INSTANCE = "no_ready_instance"
    NO_STANDBY = "no_standby"
    NO_VERDICT = "no_verdict"
    PARKED = "parked"
    PARTIAL = "partial"
    POLICY_CHANGED = "policy_changed"
    POLICY_INVALID = "policy_invalid"
    PRESSURE = "pressure"
    PREWARM_BLOCKED = "prewarm_blocked"
    PREWARM_RECENT = "prewarm_recent"
    PROMOTED = "promoted"
    QUARANTINED = "quarantined"
    RANK_TOO_LARGE = "rank_too_large"
    RESIDENTS_CHANGED = "residents_changed"
    RESIDENT_MISSING = "resident_missing"
    RETENTION_CROSSED = "retention_crossed"
    RETENTION_OVER = "retention_over"
    ROLLED_BACK = "rolled_back"
    SEMANTIC_CONFLICT = "semantic_conflict"
    SHEDDING = "shedding"
    SILENT = "silent"
    SLOTS_FULL = "slots_full"
    STALE = "stale"
    STANDBY_DRAINED = "standby_drained"
    STANDBY_STARTED = "standby_started"
    SUPERSEDED = "superseded"
    SUSTAINED = "sustained"
    TARGET_BUSY = "target_busy"
    UNWANTED = "unwanted"
    VERIFIED = "verified"
    VERSION_QUARANTINED = "version_quarantined"
    VERSION_UNKNOWN = "version_unknown"
    WEIGHTS_CHANGED = "weights_changed"
    WEIGHT_TOO_SMALL = "weight_too_small"


class RuleValue(Model):
    """One rule as it stood: `margin` is how far `value` was from the other side of `threshold`, in the same unit."""

    id: Name
    value: int = Field(strict=True)
    threshold: int = Field(strict=True)
    margin: int = Field(strict=True)
    fired: bool


class Candidate(Model):
    """Something that could have been chosen, and why it was or was not."""

    id: Text
    chosen: bool
    reason: Reason


class InputAge(Model):
    """How old a fact was when the decision read it, in ledger time."""

    id: Text
    pos: Count
    age_us: Us


class Why(Model):
    """Reason, rules with values and margins, candidates, causes and the policy of one decision."""

    reason: Reason
    rules: tuple[RuleValue, ...] = Field(default=(), max_length=RULES_MAX)
    candidates: tuple[Candidate, ...] = Field(default=(), max_length=CANDIDATES_MAX)
    causes: tuple[Count, ...] = ()
    inputs: tuple[InputAge, ...] = ()
    policy: Digest | None = None


class Request(Data):
    """What a person asks for, through the CLI."""

    KIND = "request"

    actor: Text
    reason: Text = ""


class Fact(Data):
    """What a service saw or did."""

    KIND = "fact"


class Outcome(Fact):
    """A fact that an order brought about; `done` marks the last one of that order."""

    order: EventId | None = None
    attempt: Count = 1
    done: bool = False


class Decision(Data):
    """What is to be done, or why not."""

    KIND = "decision"

    why: Why


class Order(Decision):
    """A decision that a worker carries out: one open order per target."""

    node: Name
    target: Text
    expires_us: Us = Field(description="ledger time after which the arbitrator gives the order up")
    ttl_us: Us = Field(description="age by the broker's clock beyond which a worker does not begin it")


class LedgerRow(Data):
    """What the arbitrator itself writes into the ledger."""

    KIND = "ledger"
