"""``kvist chat``: history, commands, piped input."""

from __future__ import annotations

import pytest
from tests.support.engine_fakes import EOS, answer

from kvist.cli.chat import Conversation
from kvist.types import SamplingParams

GREEDY = ["--temperature", "0", "--max-tokens", "6"]


def reply(prompt: str) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    return bytes(t for t in answer(list(prompt.encode()), params) if t != EOS).decode()


def test_each_turn_sends_the_whole_conversation(parts, kvist):
    result = kvist("chat", *GREEDY, stdin="hello\nand then\n")
    assert result.exit_code == 0, result.output
    first = reply("user: hello\nassistant: ")
    second = reply(f"user: hello\nassistant: {first}\nuser: and then\nassistant: ")
    assert result.stdout == f"{first}\n{second}\n"


def test_the_second_turn_reuses_the_first(parts, kvist):
    result = kvist("chat", *GREEDY, stdin="hello\nand then\n")
    first, second = result.stderr.splitlines()
    assert first.startswith("reused 0 of ")
    assert int(second.split()[1]) >= len("user: hello\nassistant: ") - 1


def test_system_message_comes_first(parts, kvist):
    result = kvist("chat", *GREEDY, "--system", "be brief", stdin="hello\n")
    assert result.stdout == reply("system: be brief\nuser: hello\nassistant: ") + "\n"


def test_reset_forgets_the_turns_and_keeps_the_system_message(parts, kvist):
    result = kvist("chat", *GREEDY, stdin="/system be brief\nhello\n/reset\nhello\n")
    once = reply("system: be brief\nuser: hello\nassistant: ")
    assert result.stdout == f"{once}\n{once}\n"


def test_system_without_text_removes_it(parts, kvist):
    result = kvist("chat", *GREEDY, "--system", "be brief", stdin="/system\nhello\n")
    assert result.stdout == reply("user: hello\nassistant: ") + "\n"


def test_quit_ends_before_the_rest(parts, kvist):
    result = kvist("chat", *GREEDY, stdin="/quit\nhello\n")
    assert result.exit_code == 0
    assert result.stdout == ""


def test_stats_show_the_counters(parts, kvist):
    result = kvist("chat", *GREEDY, stdin="/stats\n")
    assert "num_hit_tokens: 0" in result.stderr


@pytest.mark.parametrize("line", ["/help", "/rset"])
def test_help_lists_the_commands_and_an_unknown_one_points_to_it(parts, kvist, line):
    result = kvist("chat", *GREEDY, stdin=f"{line}\n\n")
    assert result.exit_code == 0
    assert "/help" in result.stderr or "/reset" in result.stderr
    assert result.stdout == ""


def test_a_message_that_is_too_long_does_not_end_the_conversation(parts, kvist):
    result = kvist("chat", *GREEDY, stdin="x" * 300 + "\nhello\n")
    assert result.exit_code == 0
    assert "the 128 tokens a request may have" in result.stderr
    assert result.stdout == reply("user: hello\nassistant: ") + "\n"


def test_several_answers_per_turn_are_refused(parts, kvist):
    result = kvist("chat", "--n", "2", stdin="hello\n")
    assert result.exit_code == 1
    assert "--n must be 1" in result.stderr


def test_a_conversation_does_not_change_by_asking():
    conversation = Conversation(system="s")
    assert [m["role"] for m in conversation.with_user("u")] == ["system", "user"]
    assert conversation.messages == []
