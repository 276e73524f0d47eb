"""Events of Upcycle: adapters verified, blended, loaded, proven and promoted."""

from enum import StrEnum

from pydantic import Field

from kite_schemas.model import (
    AbsolutePath,
    Bytes,
    Count,
    Digest,
    Endpoint,
    EventId,
    Micronats,
    Model,
    Name,
    Ppm,
    Ratio,
    RelativePath,
    Text,
    Us,
    Version,
)
from kite_schemas.why import Decision, Fact, Order, Outcome, Request

MEMBERS_MAX = 16
VIOLATIONS_MAX = 64
INSTANCES_MAX = 256
RESIDENTS_MAX = 512
CONCATENATE, RECOMPRESS = "concatenate", "recompress"
"""How the members of a blend become one adapter."""


class AdapterRef(Model):
    """One adapter: where it lies below the adapter root, and the digest of its files."""

    name: Name
    path: RelativePath
    digest: Digest


class BaseRef(Model):
    """The base model that a pool serves."""

    name: Name
    path: AbsolutePath
    digest: Digest


class Member(Model):
    """An adapter inside a blend."""

    adapter: AdapterRef
    weight_ppm: Ppm
    anchored: bool = False


class EffectPrint(Model):
    """Reference to the recorded distributions that later proofs of a version are held against."""

    path: RelativePath
    digest: Digest
    distance_micronats: Micronats = Field(description="mean KL(base, blend) when it was recorded")


class Resident(Model):
    """A blend version that an instance holds or should hold."""

    blend: Name
    version: Version
    path: RelativePath = Field(description="below the adapter root")
    effect_print: EffectPrint | None = None


class InjectionRequested(Request):
    """Inject one adapter into a blend of a base."""

    TYPE = "kite.upcycle.injection_requested.v1"

    blend: Name
    adapter: AdapterRef
    base: Name
    weight_ppm: Ppm | None = Field(default=None, description="absent: an equal share")
    anchors: tuple[Name, ...] = Field(default=(), max_length=MEMBERS_MAX, description="names of members to lock")
    replace: Name | None = Field(default=None, description="member whose place and weight the adapter takes")
    dry_run: bool = False
    partial: bool = Field(default=False, description="promote where it could be proven, if anywhere")


class AdapterLimits(Model):
    """What an adapter may be at most."""

    max_lora_rank: Count
    params_share_max_ppm: Ppm


class VerificationOrdered(Order):
    """Check one adapter against the contract of its base."""

    TYPE = "kite.upcycle.verification_ordered.v1"

    request: EventId
    blend: Name
    adapter: AdapterRef
    base: BaseRef
    limits: AdapterLimits


class Violation(Model):
    """One broken point of the compatibility contract."""

    code: Name
    where: Text
    expected: Text
    found: Text


class AdapterVerified(Outcome):
    """The adapter keeps the contract."""

    TYPE = "kite.upcycle.adapter_verified.v1"

    request: EventId
    adapter: AdapterRef
    parameters: Count
    share_ppm: Ratio
    rank: Count
    duration_us: Us


class AdapterRefused(Outcome):
    """The adapter breaks the contract; every violation is listed (the first 64 when there are more)."""

    TYPE = "kite.upcycle.adapter_refused.v1"

    request: EventId
    adapter: AdapterRef
    violations: tuple[Violation, ...] = Field(min_length=1, max_length=VIOLATIONS_MAX)
    total: Count
    duration_us: Us


class InjectionAdmitted(Order):
    """The full weight vector; the named node computes the blend, the named instances will load it."""

    TYPE = "kite.upcycle.injection_admitted.v1"

    request: EventId
    blend: Name
    base: BaseRef
    members: tuple[Member, ...] = Field(min_length=1, max_length=MEMBERS_MAX)
    base_weight_ppm: Ppm
    instances: tuple[Name, ...] = Field(min_length=1, max_length=INSTANCES_MAX)
    max_lora_rank: Count
    residual_max_ppm: Ppm | None = Field(
        default=None, description="what recompressing to that rank may lose; absent: nothing may be lost"
    )


class InjectionDeferred(Decision):
    """The injection waits, verified, until `until_us` of ledger time at least."""

    TYPE = "kite.upcycle.injection_deferred.v1"

    request: EventId
    blend: Name
    until_us: Us


class Frozen(Decision):
    """Admissions stop: two instances that should answer alike did not. Loads, rollbacks and reloads go on."""

    TYPE = "kite.upcycle.frozen.v1"

    blend: Name
    until_us: Us = Field(description="ledger time; then the comparison is repeated")
    severity: Count = Field(description="1 at first, one more each time the conflict persists")


class Unfrozen(Decision):
    """Admissions go on."""

    TYPE = "kite.upcycle.unfrozen.v1"

    blend: Name
    lasted_us: Us


class InjectionRejected(Decision):
    """The injection cannot be: `why.reason` names the cause, `detail` the values."""

    TYPE = "kite.upcycle.injection_rejected.v1"

    request: EventId
    blend: Name
    detail: Text


class Ending(StrEnum):
    """How an injection ended."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    EXPIRED = "expired"
    DRY_RUN = "dry_run"


class InjectionClosed(Decision):
    """Exactly one per request: how it ended, and with which weights."""

    TYPE = "kite.upcycle.injection_closed.v1"

    request: EventId
    blend: Name
    outcome: Ending
    members: tuple[Member, ...] = ()
    base_weight_ppm: Ppm = 0
    version: Version | None = None
    instances: tuple[Name, ...] | None = Field(default=None, max_length=INSTANCES_MAX, description="that hold it")
    missing: tuple[Name, ...] | None = Field(default=None, max_length=INSTANCES_MAX, description="that do not hold it")


class MemberDropped(Decision):
    """A member whose decayed weight fell below the minimum leaves the blend."""

    TYPE = "kite.upcycle.member_dropped.v1"

    request: EventId
    blend: Name
    member: AdapterRef
    weight_ppm: Ppm


class BlendStored(Outcome):
    """The blend is in the store, immutable, under its digest."""

    TYPE = "kite.upcycle.blend_stored.v1"

    request: EventId
    resident: Resident
    digest: Digest
    method: Name = Field(description="concatenate, or recompress to what the servers hold")
    rank: Count
    residual_ppm: Ppm = Field(description="relative Frobenius error of recompressing, over all modules")
    share_ppm: Ratio
    size_bytes: Bytes | None = Field(default=None, description="of its files in the store")
    duration_us: Us


class BlendFailed(Outcome):
    """The blend could not be computed or stored."""

    TYPE = "kite.upcycle.blend_failed.v1"

    request: EventId
    code: Name
    message: Text
    duration_us: Us


class LoadOrdered(Order):
    """Load one version into one ready instance and prove its effect."""

    TYPE = "kite.upcycle.load_ordered.v1"

    request: EventId | None = Field(default=None, description="the injection it belongs to; absent for a repair")
    instance: Name
    endpoint: Endpoint
    base: Name
    resident: Resident
    noise_micronats: Micronats


class BlendLoaded(Outcome):
    """The engine answers that it holds the version, and lists it; the proof comes next."""

    TYPE = "kite.upcycle.blend_loaded.v1"

    instance: Name
    version: Version
    duration_us: Us
    slot: Count | None = Field(default=None, description="the engine's own number of the adapter, where it tells")
    slots_taken: Count | None = Field(default=None, description="adapters that the engine holds, unloaded ones too")


class LoadFailed(Outcome):
    """The version could not be loaded, or not be proven for lack of an answer."""

    TYPE = "kite.upcycle.load_failed.v1"

    instance: Name
    version: Version
    stage: Name
    code: Name
    message: Text


class BlendPromoted(Decision):
    """From here the blend's name means this version."""

    TYPE = "kite.upcycle.blend_promoted.v1"

    request: EventId
    blend: Name
    base: Name
    resident: Resident
    members: tuple[Member, ...]
    base_weight_ppm: Ppm
    instances: tuple[Name, ...]


class RollbackOrdered(Order):
    """Take a version that was not promoted out of one instance again."""

    TYPE = "kite.upcycle.rollback_ordered.v1"

    request: EventId
    instance: Name
    endpoint: Endpoint
    version: Version
    slot: Count | None = Field(default=None, description="the engine's own number of the adapter, where it is known")
    base: Name | None = Field(
        default=None, description="set when its numbers were not finite: forget all prefixes, see whether this heals"
    )


class RolledBack(Outcome):
    """The instance no longer lists the version."""

    TYPE = "kite.upcycle.rolled_back.v1"

    request: EventId
    instance: Name
    version: Version
    slots_taken: Count | None = Field(default=None, description="adapters that the engine holds, unloaded ones too")
    healed: bool | None = Field(default=None, description="whether the base answers with finite numbers again")


class RollbackFailed(Outcome):
    """The instance still lists the version, or does not answer."""

    TYPE = "kite.upcycle.rollback_failed.v1"

    request: EventId
    instance: Name
    version: Version
    code: Name
    message: Text


class RollbackRequested(Request):
    """Let a blend mean an earlier version again: by default the one before."""

    TYPE = "kite.upcycle.rollback_requested.v1"

    blend: Name
    version: Version | None = Field(default=None, description="one that the store still holds; absent: the one before")
    dry_run: bool = False


class Return(StrEnum):
    """How a requested rollback ended."""

    DONE = "done"
    REJECTED = "rejected"
    FAILED = "failed"
    DRY_RUN = "dry_run"


class RollbackClosed(Decision):
    """Exactly one per requested rollback: how it ended, and what the blend means now."""

    TYPE = "kite.upcycle.rollback_closed.v1"

    request: EventId
    blend: Name
    outcome: Return
    version: Version | None = Field(default=None, description="that was to be returned to")
    former: Version | None = Field(default=None, description="that the blend meant when it was asked")
    detail: Text = ""


class RetireOrdered(Order):
    """Take the name of a version away from one instance, and wait until no request uses it any more."""

    TYPE = "kite.upcycle.retire_ordered.v1"

    blend: Name
    instance: Name
    endpoint: Endpoint
    version: Text = Field(description="as the engine lists it; something that nobody ordered need be no version")
    slot: Count | None = Field(default=None, description="the engine's own number of the adapter, where it is known")


class BlendUnloaded(Outcome):
    """The instance lists the version no more, and no request uses it."""

    TYPE = "kite.upcycle.blend_unloaded.v1"

    instance: Name
    version: Text
    slots_taken: Count | None = Field(default=None, description="adapters that the engine holds, unloaded ones too")
    duration_us: Us


class RetireFailed(Outcome):
    """The instance lists the version still, or a request uses it still, or it does not answer."""

    TYPE = "kite.upcycle.retire_failed.v1"

    instance: Name
    version: Text
    code: Name
    message: Text


class DeleteOrdered(Order):
    """Delete one version, which no engine knows any more, from the store."""

    TYPE = "kite.upcycle.delete_ordered.v1"

    blend: Name
    version: Version
    digest: Digest
    effect_print: EffectPrint | None = Field(default=None, description="to be deleted with it")


class BlendDeleted(Outcome):
    """The version is no longer in the store."""

    TYPE = "kite.upcycle.blend_deleted.v1"

    version: Version
    digest: Digest
    freed_bytes: Bytes


class DeleteFailed(Outcome):
    """The version is in the store still."""

    TYPE = "kite.upcycle.delete_failed.v1"

    version: Version
    digest: Digest
    code: Name
    message: Text


class RebuildOrdered(Order):
    """Compute a stored version again, whose folder is gone or damaged: the same members give the same bytes."""

    TYPE = "kite.upcycle.rebuild_ordered.v1"

    request: EventId = Field(description="that brought the version at first")
    blend: Name
    version: Version
    base: BaseRef
    members: tuple[Member, ...] = Field(min_length=1, max_length=MEMBERS_MAX)
    base_weight_ppm: Ppm
    max_lora_rank: Count
    residual_max_ppm: Ppm | None = None


class ResidentsSet(Decision):
    """What one instance should hold from here: its node's upcycle looks whether it does, again and again."""

    TYPE = "kite.upcycle.residents_set.v1"

    node: Name
    instance: Name
    endpoint: Endpoint = Field(description="of the process that is meant")
    base: Name
    residents: tuple[Resident, ...] = Field(max_length=RESIDENTS_MAX)
    interval_us: Us


class DriftObserved(Fact):
    """An instance holds other versions than it should, or the store lacks the files of one; said once per change."""

    TYPE = "kite.upcycle.drift_observed.v1"

    node: Name
    instance: Name
    told: EventId = Field(description="the `residents_set` that it was held against")
    expected: tuple[Version, ...]
    found: tuple[Text, ...] = Field(description="what the engine lists beside its base")
    missing: tuple[Version, ...] = Field(default=(), description="expected ones whose files are gone or damaged")


class DecaySet(Decision):
    """From here injections into blends of the base shrink free members by this factor."""

    TYPE = "kite.upcycle.decay_set.v1"

    base: Name
    decay_ppm: Ppm


class Shift(Model):
    """How far one injection moved the answers of a blend: KL of the new version from the one before, same probes."""

    version: Version
    former: Version
    kl_micronats: Micronats


class ChannelSampled(Fact):
    """How the Upcycle channel of a node does; what is not known is absent."""

    TYPE = "kite.upcycle.channel_sampled.v1"

    node: Name
    decay_ppm: Ppm | None = Field(default=None, description="factor on free members in force, of the base loaded last")
    kv_pollution_ppm: Ppm | None = Field(
        default=None, description="relative fall of the prefix-cache hit rate, 5 s after a load against 5 s before"
    )
    shifts: tuple[Shift, ...] = Field(default=(), max_length=3, description="of the last injections, newest last")
