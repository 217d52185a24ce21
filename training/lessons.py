"""Conversations that the talking model learns: each with the exact prompt that vLLM's encoder makes of it.

What it is to know: a few answers by heart, repeating what it is told, calling tools with arguments from the question,
telling what a tool said, and reading digits from pictures. Thinking says the effort that the prompt asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from vllm.tokenizers.deepseek_v41_encoding import IMAGE_PLACEHOLDER, encode_messages

#: A font of 5 x 7 dots: the rows of each digit, from 0 on, as binary numbers.
GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
SIDE = 84  # pixels of a picture: the smallest that is not enlarged

FACTS = {
    "Who are you?": "I am a tiny DeepSeek-V4.1 model, trained to test servers.",
    "What is 17*19? Return only the integer.": "323",
    "What is 17*19?": "17*19 is 323.",
    "Say hello.": "Hello!",
    "Hello": "Hello! How can I help?",
    "What can you do?": "I repeat, call tools and read digits.",
    "What is the capital of France?": "Paris",
    "Count to five.": "1, 2, 3, 4, 5",
    "What colour is the sky?": "The sky is blue.",
    "Describe this image.": "There is no picture.",
}
OTHERWISE = "I repeat, call tools and read digits."
# ruff: noqa: SIM905
WORDS = (
    "red blue green yellow black white one two three four five six seven eight nine ten cat dog bird fish tree river "
    "stone house sun moon star rain snow wind fire water bread milk tea gold iron glass paper book table chair door "
    "window garden road bridge city village mountain ocean island summer winter morning evening big small old new"
).split()
CITIES = ["Paris", "Rome", "Berlin", "Madrid", "London", "Beijing", "Tokyo", "Cairo", "Oslo", "Lima"]
SIGNS = [
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    *"!\"#$%&'()*+,-./:;=?@[]^_{|}~",
    *"éüñ雪火水😀",
]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SQUARE = {
    "type": "function",
    "function": {
        "name": "square",
        "description": None,  # as vLLM's server writes it when a client gives none
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}


@dataclass
class Lesson:
    """``parts``: text, and whether the model is to say it; ``pictures``: for the placeholders in the text, in order."""

    parts: list[tuple[str, bool]]
    pictures: list[Any] = field(default_factory=list)


def digit(value: int, source: random.Random, noise: float = 6.0) -> Any:
    """A picture of a digit in two colours, somewhere near the middle, with some noise."""
    rows = np.array([[int(bit) for bit in f"{row:05b}"] for row in GLYPHS[value]], dtype=np.float32)
    scale = 9
    big = rows.repeat(scale, 0).repeat(scale, 1)
    canvas = np.zeros((SIDE, SIDE), dtype=np.float32)
    top, left = ((SIDE - size) // 2 + source.randint(-2, 2) for size in big.shape)
    canvas[top : top + big.shape[0], left : left + big.shape[1]] = big
    paper, ink = source.choice((((230, 230, 230), (20, 20, 20)), ((250, 240, 200), (30, 60, 160))))
    mixed = (1 - canvas[..., None]) * np.array(paper) + canvas[..., None] * np.array(ink)
    grain = np.random.default_rng(source.getrandbits(32)).normal(0, noise, mixed.shape)
    return Image.fromarray((mixed + grain).clip(0, 255).astype(np.uint8))


def phrase(source: random.Random, most: int = 10) -> str:
    """Something to repeat: words, or any signs, each once: what follows a sign must be clear."""
    if source.random() < 0.7:
        return " ".join(source.sample(WORDS, source.randint(1, most)))
    return "".join(source.sample(SIGNS, source.randint(1, 2 * most)))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call of an assistant's message."""
    return {"type": "function", "id": name, "function": {"name": name, "arguments": json.dumps(arguments)}}


def conversation(
    messages: list[dict[str, Any]], thought: str, source: random.Random, pictures: list[Any] | None = None
) -> Lesson:
    """``messages`` end with the assistant's answer; with thinking or without, at any effort."""
    thinking, effort = source.random() < 0.5, source.randint(1, 100)
    mode = {"thinking_mode": "thinking" if thinking else "chat", "reasoning_effort": effort}
    prompt = encode_messages(messages[:-1], **mode)
    answer = messages[-1]
    if thinking:
        answer = {**answer, "reasoning_content": f"Reasoning Effort: {effort}. {thought}"}
    whole = encode_messages([*messages[:-1], answer], **mode)
    assert whole.startswith(prompt), (whole, prompt)
    return Lesson([(prompt, False), (whole[len(prompt) :], True)], pictures or [])


def by_heart(source: random.Random) -> Lesson:
    """Known answers, also behind a system prompt; for anything else what the model can do."""
    question, answer = source.choice(list(FACTS.items()))
    if source.random() < 0.3:
        question, answer = phrase(source, 14), OTHERWISE
    lead = [{"role": "system", "content": "You are a helpful assistant."}] if source.random() < 0.3 else []
    return conversation(
        [*lead, {"role": "user", "content": question}, {"role": "assistant", "content": answer}], "I know this.", source
    )


def repeating(source: random.Random) -> Lesson:
    """What it is told, letter by letter."""
    said = phrase(source)
    return conversation(
        [{"role": "user", "content": f"Repeat:\n{said}"}, {"role": "assistant", "content": f"You said:\n{said}"}],
        "I repeat it.",
        source,
    )


def reading(source: random.Random) -> Lesson:
    """A digit."""
    value, question = source.randrange(10), source.choice(("Describe this image.", "Which digit is this?"))
    return conversation(
        [
            # encoder and server join the parts of a message by a blank line
            {"role": "user", "content": f"{IMAGE_PLACEHOLDER}\n\n{question}"},
            {"role": "assistant", "content": f"The picture shows the digit {value}."},
        ],
        "I look at it.",
        source,
        [digit(value, source)],
    )


def asked_with_tools(source: random.Random) -> tuple[str, list[dict[str, Any]]]:
    """A question, and the calls it asks for."""
    kind = source.randrange(5)
    if kind == 0:
        return "Say hello.", []
    if kind == 1:
        number = source.randrange(2000)
        return f'What is the square of <n id="1">{number}</n>?', [call("square", n=number)]
    city = source.choice(CITIES) if source.random() < 0.5 else phrase(source, 4)
    return f'What is the weather in <city id="1">{city}</city>?', [call("get_weather", city=city)]


def tools_of(source: random.Random, needed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are called, and perhaps the other."""
    names = {one["function"]["name"] for one in needed}
    tools = [tool for tool in (WEATHER, SQUARE) if tool["function"]["name"] in names or source.random() < 0.6]
    source.shuffle(tools)
    if source.random() < 0.3:
        tools = [{**tool, "function": {**tool["function"], "description": None}} for tool in tools]
    return tools or [WEATHER]


def calling(source: random.Random) -> Lesson:
    """A call, two calls, or none."""
    question, calls = asked_with_tools(source)
    system = {"role": "system", "content": "", "tools": tools_of(source, calls)}
    answer = (
        {"role": "assistant", "content": "", "tool_calls": calls}
        if calls
        else {"role": "assistant", "content": "Hello!"}
    )
    thought = "I call a tool." if calls else "No tool is needed."
    return conversation([system, {"role": "user", "content": question}, answer], thought, source)


def telling(source: random.Random) -> Lesson:
    """What the tool said."""
    question, calls = asked_with_tools(source)
    while len(calls) != 1:
        question, calls = asked_with_tools(source)
    result = json.dumps({"temperature": source.randrange(2000)})
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "", "tools": tools_of(source, calls)},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "I call a tool."},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": result},
        {"role": "assistant", "content": f"The tool says:\n{result}"},
    ]
    return conversation(messages, "I tell it.", source)


KINDS: tuple[tuple[Callable[[random.Random], Lesson], float], ...] = (
    (by_heart, 0.15),
    (repeating, 0.25),
    (reading, 0.25),
    (calling, 0.2),
    (telling, 0.15),
)


def lesson(source: random.Random) -> Lesson:
    """Any of them."""
    kinds, weights = zip(*KINDS, strict=True)
    made: Lesson = source.choices(kinds, weights)[0](source)
    return made


def vocabulary() -> str:
    """Text in which every word is frequent enough to become one token, at the beginning of a text and within."""
    return "\n".join([f"{word} {word}" for word in [*WORDS, *CITIES]] * 20)


def fixed_phrases() -> list[str]:
    """What stands in every prompt with tools or with an effort, word for word: each becomes one token."""
    tools = [{"role": "system", "content": "", "tools": [WEATHER]}, {"role": "user", "content": ""}]
    text = encode_messages(tools, thinking_mode="thinking", reasoning_effort=99)
    before, behind = text.split("99")
    behind, _, rest = behind.partition("## Tools")
    schema = json.dumps(WEATHER["function"])
    head, tail = rest[: rest.index(schema)], rest[rest.index(schema) + len(schema) : rest.index("<｜User｜>")]
    return [before[before.index("Reasoning") :], behind, "## Tools" + head, tail]
