from __future__ import annotations

import pytest

from kvferry.core import IllegalTransitionError
from kvferry.transceiver.sessions import SESSION_TRANSITIONS, SessionState, new_lifecycle

ENDS = {SessionState.DONE, SessionState.FAILED, SessionState.CANCELLED}


def test_the_usual_story() -> None:
    lifecycle = new_lifecycle()
    for state in (SessionState.ADVERTISED, SessionState.TRANSFERRING, SessionState.DONE):
        lifecycle.to(state)
    assert lifecycle.ended


@pytest.mark.parametrize("state", SessionState)
def test_every_live_state_can_fail_and_no_end_can_be_left(state: SessionState) -> None:
    moves = SESSION_TRANSITIONS[state]
    if state in ENDS:
        assert not moves
    else:
        assert {SessionState.FAILED, SessionState.CANCELLED} <= moves


def test_nothing_moves_before_the_handle_is_out() -> None:
    with pytest.raises(IllegalTransitionError, match="CREATED -> TRANSFERRING"):
        new_lifecycle().to(SessionState.TRANSFERRING)
