"""Whether drafts are accepted, from /metrics before and after."""

from __future__ import annotations

from collections.abc import Mapping

from ..doctor.report import Result, bad, good, skip, warn

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
STUCK = "dsv41:draft_stuck"  # this package's gauge
ENOUGH = 30  # drafts that say something


def drafts(before: Mapping[str, float], after: Mapping[str, float]) -> Result:
    """Mean acceptance length of the checks' own requests, and of whoever else used the service meanwhile."""
    name = "drafts"
    if not after:
        return skip(name, "the service has no /metrics")
    if DRAFTS not in after:
        return skip(name, "the service does not draft")
    made = after[DRAFTS] - before.get(DRAFTS, 0.0)
    accepted = after.get(ACCEPTED, 0.0) - before.get(ACCEPTED, 0.0)
    if not before or made < 0 or accepted < 0:
        return skip(name, "/metrics were of different replicas, or of a server that began anew")
    if made == 0:
        return warn(name, "nothing was drafted while the checks ran", "drafts", "see the server's --speculative-config")
    length = 1 + accepted / made
    found = f"mean acceptance length {length:.2f} over {made:.0f} drafts"
    if after.get(STUCK, 0.0) > 0 or (made >= ENOUGH and length < 1.005):
        remedy = (
            "the draft is stuck: the text is right and slow. Usual causes: mtp tensors of another conversion, or "
            "rotated like the trunk; `dsv41 verify`"
        )
        return bad(name, found, "more than 1.00", remedy)
    if made < ENOUGH:
        return warn(name, found, f"{ENOUGH} drafts at least", "ask more, to know")
    return good(name, found)
