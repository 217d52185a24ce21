"""vLLM's parsers as recipes name them, on shapes from public reports: nothing leaks and nothing is lost, however the
stream is cut."""

from __future__ import annotations

import json

import pytest
from tokenizers.decoders import DecodeStream

from api.shapes import FAULTS, SHAPES

PROPERTIES = {"s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"}}
PROPERTIES |= {"o": {"type": "object"}, "a": {"type": "array"}, "u": {"type": ["string", "null"]}, "q": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("note", PROPERTIES), ("stop", {}))
]


@pytest.fixture(scope="module")
def tokenizer(official):
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    return DeepseekV41Tokenizer.from_pretrained(str(official("a")))


@pytest.fixture(scope="module")
def parser(tokenizer):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    made = ParserManager.get_parser("deepseek_v41", "deepseek_v41", enable_auto_tools=True)

    def fresh(shape):
        kwargs = {"thinking": shape.thinking}
        more = {"tools": TOOLS} if shape.tools else {}
        asked = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs, **more}
        request = ChatCompletionRequest.model_validate(asked)
        return made(tokenizer, request.tools, chat_template_kwargs=kwargs), request

    return fresh


def pieces(tokenizer, said):
    """Token ids with the text that each adds, as the detokeniser gives it."""
    stream, backend = DecodeStream(skip_special_tokens=True), tokenizer._tokenizer
    return [(token, stream.step(backend, token) or "") for token in backend.encode(said, add_special_tokens=False).ids]


def read(reasoning, content, calls):
    """In comparable form; arguments must be JSON. Blank lines between text and calls belong to the markup."""
    content = (content or "").rstrip("\n") if calls else content or ""
    return (reasoning or "").rstrip("\n"), content, [(name, json.loads(arguments)) for name, arguments in calls]


def whole(parser, shape, tokens):
    parse, request = parser(shape)
    said = "".join(text for _, text in tokens)
    reasoning, content, calls = parse.parse(said, request, True, [token for token, _ in tokens])
    return read(reasoning, content, [(call.name, call.arguments) for call in calls or ()])


def streamed(parser, shape, tokens, prompt, sizes):
    """Deltas of so many tokens."""
    parse, request = parser(shape)
    reasoning, content, calls, at = "", "", {}, 0
    for size in sizes:
        part = tokens[at : at + size]
        at += size
        delta = parse.parse_delta(
            "".join(text for _, text in part),
            [token for token, _ in part],
            request,
            prompt_token_ids=prompt,
            finished=at >= len(tokens),
        )
        if delta is None:
            continue
        reasoning, content = reasoning + (delta.reasoning or ""), content + (delta.content or "")
        for call in delta.tool_calls or ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert sorted(calls) == list(range(len(calls)))
    return read(reasoning, content, [calls[index] for index in sorted(calls)])


def expected(shape):
    return shape.reasoning, shape.content, [(name, arguments) for name, arguments in shape.calls]


def cuts(length):
    """Every cut into two, token by token, in threes, and all at once."""
    yield [length]
    yield [1] * length
    yield [3] * (length // 3) + ([length % 3] if length % 3 else [])
    for first in range(1, length):
        yield [first, length - first]


def hold(parser, tokenizer, shape):
    """Non-streaming and every stream."""
    tokens = pieces(tokenizer, shape.said)
    assert "".join(text for _, text in tokens) == shape.said
    prompt = tokenizer.encode(
        "<｜Assistant｜>" + ("<think>" if shape.thinking else "</think>"), add_special_tokens=False
    )
    assert whole(parser, shape, tokens) == expected(shape), "in one piece"
    for sizes in cuts(len(tokens)):
        found = streamed(parser, shape, tokens, prompt, sizes)
        assert found == expected(shape), f"deltas of {sizes[:6]} tokens"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shape(parser, tokenizer, shape):
    hold(parser, tokenizer, shape)


@pytest.mark.parametrize("shape", FAULTS, ids=lambda shape: shape.name)
@pytest.mark.xfail(strict=True, raises=(AssertionError, ValueError), reason="vLLM 0.30.0's parser: docs/requests.md")
def test_known_fault(parser, tokenizer, shape):
    hold(parser, tokenizer, shape)


def test_there_are_enough():
    assert len(SHAPES) >= 40
    assert len({shape.name for shape in (*SHAPES, *FAULTS)}) == len(SHAPES) + len(FAULTS)
