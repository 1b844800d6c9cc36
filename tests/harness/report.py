"""The failure message of a distributed call: what happened first, then what each rank has to say."""

from __future__ import annotations

from tests.harness.protocol import Outcome

OUTPUT_TAIL = 4000  # characters of each stream of each rank


def first_failure(outcomes: list[Outcome]) -> Outcome:
    """The rank that failed for a reason of its own.

    A rank that dies closes its sockets, and its peers raise because of that; a rank that raises stays
    until the others have been stopped. So a death explains an exception, never the reverse.
    """
    died = [outcome for outcome in outcomes if outcome.state == "died"]
    raised = [outcome for outcome in outcomes if outcome.state == "raised"]
    hung = [outcome for outcome in outcomes if outcome.state == "hung"]
    return [*died, *sorted(raised, key=lambda outcome: outcome.failed_at), *hung][0]


def describe(name: str, outcomes: list[Outcome], seconds: float) -> str:
    """The whole message. The first failing rank comes first."""
    first = first_failure(outcomes)
    states = ", ".join(f"{outcome.rank}: {_ending(outcome)}" for outcome in outcomes)
    parts = [f"{name}: rank {first.rank} {_ending(first)} after {seconds:.1f} s. Ranks: {states}"]
    for outcome in [first, *(outcome for outcome in outcomes if outcome is not first)]:
        # The exceptions and output of the others are mostly echoes of the first one's, but not always.
        parts += _section(outcome, "traceback", outcome.traceback)
        parts += _section(outcome, "stacks when time was up", outcome.stacks)
        parts += _section(outcome, "stdout", outcome.stdout[-OUTPUT_TAIL:])
        parts += _section(outcome, "stderr", outcome.stderr[-OUTPUT_TAIL:])
    return "\n".join(parts)


def _ending(outcome: Outcome) -> str:
    if outcome.state == "died":
        by = (
            f"by signal {-outcome.exit_code}"
            if outcome.exit_code < 0
            else f"with exit code {outcome.exit_code}"
        )
        return f"died {by}, leaving no result" if not outcome.result else f"died {by}"
    return outcome.state


def _section(outcome: Outcome, title: str, text: str) -> list[str]:
    return [f"--- rank {outcome.rank}: {title}", text.rstrip()] if text.strip() else []
