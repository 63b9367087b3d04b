"""Every error that flashrt raises on purpose.

A message names the thing, its value and the remedy. ``code`` is the stable, machine readable name
that service replies, diagnostics counters and events carry.
"""


class FlashrtError(Exception):
    """Root of the tree; catch this to answer a user's mistake without a traceback."""

    code = 'flashrt'


class ConfigError(FlashrtError):
    """A configuration value is missing, of the wrong type or out of range."""

    code = 'config_invalid'


class ContractError(FlashrtError):
    """The execution contract (runtime/) was not kept."""

    code = 'contract'


class UnboundPort(ContractError):
    """A graph was captured or replayed with a port that no buffer is bound to."""

    code = 'unbound_port'


class MissingKey(ContractError):
    """A graph has no captured variant for the asked ShapeKey."""

    code = 'missing_key'


class PlanInvalid(ContractError):
    """A plan's dependency is unknown, later than its node, or the plan is empty."""

    code = 'plan_invalid'


class CaptureFailed(ContractError):
    """A graph could not be captured."""

    code = 'capture_failed'


class OutOfMemory(ContractError):
    """An allocation did not fit; the message says asked, free and who holds the rest."""

    code = 'out_of_memory'


class AddressChanged(ContractError):
    """A buffer no longer lives where the captured graphs read it."""

    code = 'address_changed'


class LaneError(FlashrtError):
    """The lane of a session could not do what was asked."""

    code = 'lane'


class LaneBusy(LaneError):
    """Another verb is already waiting for the running segment."""

    code = 'busy'


class LaneClosed(LaneError):
    """The lane's thread has ended."""

    code = 'lane_closed'


class LaneTimeout(LaneError):
    """A segment did not finish within its time limit."""

    code = 'lane_timeout'


class DeviceLost(LaneError):
    """A sticky device error: nothing runs in this process any more; exit and be respawned."""

    code = 'device_lost'


class TickDropped(LaneError):
    """A reset, restore, hold or interrupt ended the tick at a segment's end."""

    code = 'tick_dropped'


class CapsuleError(FlashrtError):
    """A capsule verb was refused; the live session is untouched unless it says poisoned."""

    code = 'capsule'


class CapsuleNotFound(CapsuleError):
    """No capsule of that id; the message lists those held."""

    code = 'capsule_not_found'


class CapsuleIdInvalid(CapsuleError):
    """An id outside ``[A-Za-z0-9._-]{1,64}`` or with a leading dot."""

    code = 'capsule_id_invalid'


class CapsuleExists(CapsuleError):
    """A capsule of that id is held already."""

    code = 'capsule_exists'


class IdentityMismatch(CapsuleError):
    """The capsule is of another layout, or of other numerics; the message lists the fields."""

    code = 'identity_mismatch'


class CapsuleCorrupt(CapsuleError):
    """A capsule file or its bytes are not what was written."""

    code = 'capsule_corrupt'


class BudgetFull(CapsuleError):
    """No room: what is left is pinned, or the capsule is larger than the budget."""

    code = 'budget_full'


class NotAtBoundary(CapsuleError):
    """Asked between a plan's segments, where no state is committed."""

    code = 'not_at_boundary'


class BoundaryIncomplete(CapsuleError):
    """A live state buffer is missing from the boundary's list."""

    code = 'boundary_incomplete'


class SessionPoisoned(CapsuleError):
    """A restore failed during submission; the session refuses ticks until one succeeds."""

    code = 'session_poisoned'


class MarkDead(CapsuleError):
    """The memory below a mark was rewritten, so rolling back to it would lie."""

    code = 'mark_dead'


class TierUnavailable(CapsuleError):
    """The tier does not exist here, or disk saving is not allowed."""

    code = 'tier_unavailable'


class ObservationError(FlashrtError):
    """An observation cannot be used; the tick does not run on it."""

    code = 'observation'


class ObservationMissing(ObservationError):
    """Nothing received yet on a stream the policy needs."""

    code = 'observation_missing'


class ObservationStale(ObservationError):
    """Older than the stream's limit."""

    code = 'observation_stale'


class ObservationFuture(ObservationError):
    """Stamped later than now plus the tolerance."""

    code = 'observation_future'


class ObservationSkewed(ObservationError):
    """The streams of one tick lie too far apart in time."""

    code = 'observation_skewed'


class BadEncoding(ObservationError):
    """An image encoding that is not decoded here."""

    code = 'bad_encoding'


class BadSize(ObservationError):
    """A message's declared and real sizes differ, or an image's size is refused."""

    code = 'bad_size'


class BadJoints(ObservationError):
    """Joint names missing, unknown or repeated."""

    code = 'bad_joints'


class ObservationNonFinite(ObservationError):
    """NaN or infinity in a joint state."""

    code = 'observation_non_finite'


class PlannerError(FlashrtError):
    """A planner was asked for what it cannot do; its state is as it was."""

    code = 'planner'


class PromptTooLong(PlannerError):
    """The tokens do not fit into what is left of the context."""

    code = 'prompt_too_long'


class PromptEmpty(PlannerError):
    """Nothing to append, or nothing in the state to decode from."""

    code = 'prompt_empty'


class TokenUnknown(PlannerError):
    """A token id outside the vocabulary."""

    code = 'token_unknown'


class BranchesLive(PlannerError):
    """The trunk stands still while branches of it live."""

    code = 'branches_live'


class BranchesEnded(PlannerError):
    """The branches were dropped, committed or outlived by their trunk."""

    code = 'branches_ended'


class ActionError(FlashrtError):
    """An action chunk must not reach the robot."""

    code = 'action'


class ActionNonFinite(ActionError):
    """NaN or infinity in a chunk."""

    code = 'action_non_finite'


class ActionOutOfLimits(ActionError):
    """A joint target outside its limits where the policy is to reject."""

    code = 'action_out_of_limits'


class ActionJump(ActionError):
    """The first command lies too far from the measured pose."""

    code = 'action_jump'


class ServiceError(FlashrtError):
    """A service request was refused."""

    code = 'service'


class WrongState(ServiceError):
    """The node's lifecycle state does not allow the request."""

    code = 'wrong_state'


class ParameterInvalid(ServiceError):
    """A parameter's type or value is refused."""

    code = 'parameter_invalid'


class SubgoalRefused(ServiceError):
    """A subgoal is repeated, late, of another episode, or not what the policy can read."""

    code = 'subgoal_refused'
