from __future__ import annotations

import itertools

import pytest

from kvist.cache.namespaces import Namespace
from kvist.errors import InvariantViolation
from kvist.sched.request import TRANSITIONS, Request, RequestStatus
from kvist.types import RequestId, SamplingParams, TokenId

LEGAL = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
    (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
    (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
}


def make_request(status: RequestStatus = RequestStatus.WAITING) -> Request:
    request = Request(
        request_id=RequestId("a"),
        prompt_token_ids=(TokenId(1), TokenId(2)),
        params=SamplingParams(),
        namespace=Namespace(model="fake"),
        seed=0,
    )
    request.status = status
    return request


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestStatus, repeat=2)))
def test_moves_along_the_table_only(old: RequestStatus, new: RequestStatus) -> None:
    request = make_request(old)
    if (old, new) in LEGAL:
        request.move_to(new)
        assert request.status is new
    else:
        with pytest.raises(
            InvariantViolation, match=f"a cannot go from {old.value} to {new.value}"
        ):
            request.move_to(new)
        assert request.status is old


def test_the_table_knows_every_status() -> None:
    assert set(TRANSITIONS) == set(RequestStatus)


def test_counts_tokens_before_it_ever_ran() -> None:
    request = make_request()
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (2, 2, 0)
    assert request.num_uncomputed_tokens == 2
    assert request.output_token_ids == ()
    usage = request.usage()
    assert (usage.num_cached_tokens, usage.num_computed_tokens, usage.num_preemptions) == (0, 0, 0)
