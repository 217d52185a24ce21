"""What models say, and what a client must get: shapes that broke parsers of the DSML family, in V4.1's spelling.

Collected from public reports against vLLM, vllm-ascend, SGLang, llama.cpp and others; the sayings are our own.
``source`` names the report, or "derived" where the shape follows from the grammar.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<｜DSML｜ calls>\n", "</｜DSML｜ calls>"
CLOSE = "</｜DSML｜ invoke>\n"


def invoke(name: str) -> str:
    """The opening of a call."""
    return f'<｜DSML｜ invoke name="{name}">\n'


def text(name: str, value: str) -> str:
    """A parameter that is a string."""
    return f'<｜DSML｜ parameter name="{name}" string="true">{value}</｜DSML｜ parameter>\n'


def value(name: str, content: str) -> str:
    """A parameter that is JSON."""
    return f'<｜DSML｜ parameter name="{name}" string="false">{content}</｜DSML｜ parameter>\n'


def calls(*parts: str) -> str:
    """A block with one call of ``note``."""
    return BEGIN + invoke("note") + "".join(parts) + CLOSE + END


ONE = calls(text("s", "v"))
GIVEN = [("note", {"s": "v"})]


@dataclass(frozen=True)
class Shape:
    """``said`` by the model behind a prompt that ends with <think> (``thinking``) or with </think>."""

    name: str
    said: str
    source: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    thinking: bool = False
    tools: bool = True


def argument(name: str, part: str, arguments: dict[str, Any], source: str) -> Shape:
    """One call without thinking."""
    return Shape(name, "\n\n" + calls(part), source, calls=[("note", arguments)], content="")


LONG = "one line > another, " * 40
NESTED = {"list": [1, {"deep": [None, True, "x\ny"]}], "empty": {}, "text": 'a "quoted" <tag> & more'}

SHAPES = [
    # where thinking ends
    Shape("thought, then answer", "I think.</think>Four.", "vllm#51296", "I think.", "Four.", thinking=True),
    Shape("no end of thought", "I think and think", "vllm-ascend#16877", "I think and think", thinking=True),
    Shape("end of thought at once", "</think>Four.", "vllm test suite", "", "Four.", thinking=True),
    Shape("thought opened again", "<think>I think.</think>Four.", "smg#2525", "I think.", "Four.", thinking=True),
    Shape("nothing behind the thought", "I think.</think>", "vllm#53831", "I think.", "", thinking=True),
    Shape("no thinking", "Four.", "vllm-ascend#14074", "", "Four."),
    Shape("a stray end", "</think>Four.", "DeepSeek-v4-Flash-Vision#16", "", "Four."),
    Shape("a thought of many lines", "a\n\nb\n- c\n</think>d\n", "derived", "a\n\nb\n- c", "d\n", thinking=True),
    Shape(
        "less-than in a thought", "x < y <thin </thinK></think>z", "derived", "x < y <thin </thinK>", "z", thinking=True
    ),
    Shape("a call ends the thought", f"I will.\n\n{ONE}", "dynamo#10646", "I will.", "", GIVEN, thinking=True),
    Shape("thought, then a call", f"I will.</think>\n\n{ONE}", "sglang#32539", "I will.", "", GIVEN, thinking=True),
    Shape(
        "text, then a call, in a thought", f"a</think>Look:\n\n{ONE}", "vllm#28804", "a", "Look:", GIVEN, thinking=True
    ),
    # around calls
    Shape("a call alone", f"\n\n{ONE}", "vllm#47704", calls=GIVEN),
    Shape("a call without a blank line", ONE, "derived", calls=GIVEN),
    Shape("text before a call", f"Look:\n\n{ONE}", "smg#2525", content="Look:", calls=GIVEN),
    Shape("line behind a call", f"\n\n{ONE}\n", "vllm#47704", calls=GIVEN),
    Shape(
        "two calls in a block",
        BEGIN + invoke("note") + text("s", "v") + CLOSE + invoke("stop") + CLOSE + END,
        "smg#1030",
        calls=[*GIVEN, ("stop", {})],
    ),
    Shape(
        "the same tool twice",
        BEGIN + (invoke("note") + text("s", "a") + CLOSE) + (invoke("note") + text("s", "b") + CLOSE) + END,
        "derived",
        calls=[("note", {"s": "a"}), ("note", {"s": "b"})],
    ),
    Shape("two blocks", f"{ONE}\n{ONE}", "dynamo#9524", calls=GIVEN * 2),
    Shape(
        "prose between calls",
        BEGIN + invoke("note") + text("s", "v") + CLOSE + "and then\n" + invoke("stop") + CLOSE + END,
        "sglang#40236",
        calls=[*GIVEN, ("stop", {})],
    ),
    Shape("all on one line", ONE.replace("\n", ""), "PrimeIntellect renderers#140", calls=GIVEN),
    Shape("carriage returns", ONE.replace("\n", "\r\n"), "derived", calls=GIVEN),
    Shape("no end of the call", BEGIN + invoke("note") + text("s", "v") + END, "dynamo#10518", calls=GIVEN),
    Shape("no arguments", BEGIN + invoke("stop") + CLOSE + END, "vllm-ascend#10182", calls=[("stop", {})]),
    Shape(
        "no arguments, no lines",
        (BEGIN + invoke("stop") + CLOSE + END).replace("\n", ""),
        "derived",
        calls=[("stop", {})],
    ),
    Shape(
        "a tool nobody gave", calls(value("q", "5")).replace("note", "other"), "vllm#55166", calls=[("other", {"q": 5})]
    ),
    Shape(
        "a name with signs",
        ONE.replace('"note"', '"a::b-c.d"'),
        "local-inference-lab/vllm#787",
        calls=[("a::b-c.d", {"s": "v"})],
    ),
    # values
    argument(
        "types", value("i", "1") + value("b", "true") + value("u", "null"), {"i": 1, "b": True, "u": None}, "vllm#55166"
    ),
    argument("nested JSON", value("o", json.dumps(NESTED)), {"o": NESTED}, "vllm#54838"),
    argument("JSON over lines", value("o", json.dumps(NESTED, indent=2)), {"o": NESTED}, "vllm#41240"),
    argument("a negative number", value("n", "-1.5"), {"n": -1.5}, "derived"),
    argument("a list", value("a", "[1, 2, [3]]"), {"a": [1, 2, [3]]}, "opencode#26498"),
    argument("an empty string", text("s", ""), {"s": ""}, "opencode#26498"),
    argument("spaces kept", text("s", "\n  a \n"), {"s": "\n  a \n"}, "vllm#49567"),
    argument("quotes and tags", text("s", "say \"a\" <b> & 'c' 2>&1"), {"s": "say \"a\" <b> & 'c' 2>&1"}, "vllm#45877"),
    argument("HTML", text("s", '<a href="x">y</a>'), {"s": '<a href="x">y</a>'}, "vllm#45877"),
    argument("backslashes", text("s", 'C:\\new\\"x" \\u0041'), {"s": 'C:\\new\\"x" \\u0041'}, "hermes#39801"),
    argument("entities stay", text("s", "a &lt; b"), {"s": "a &lt; b"}, "hermes#39801"),
    argument("unicode", text("s", "é 雪 😀 👩‍👩‍👧 ‏שלום"), {"s": "é 雪 😀 👩‍👩‍👧 ‏שלום"}, "smg#1030"),
    argument("a name of another script", text("名", "雪"), {"名": "雪"}, "smg#1030"),
    argument("control signs", text("s", "a\tb\u2028c\r\nd"), {"s": "a\tb\u2028c\r\nd"}, "derived"),
    argument("a long text", text("s", LONG), {"s": LONG}, "vllm#52846"),
    argument(
        "code", text("s", "if a < b:\n    print('<x>')\n"), {"s": "if a < b:\n    print('<x>')\n"}, "Rapid-MLX#1730"
    ),
    argument("JSON as a string", text("s", '{"k": "v"}'), {"s": '{"k": "v"}'}, "hermes#39801"),
    argument("two of a kind", text("s", "a") + text("t", "b"), {"s": "a", "t": "b"}, "derived"),
    argument("text and numbers", text("s", "a") + value("i", "7"), {"s": "a", "i": 7}, "sglang#38924"),
    argument("all in one", value("arguments", '{"s": "v"}'), {"s": "v"}, "dynamo#10577"),
    # text that only looks like it
    Shape("less-than at the end", "2 <", "vllm#41240", content="2 <"),
    Shape("half an opening", "2 < 3 and <｜DS", "vllm#41240", content="2 < 3 and <｜DS"),
    Shape(
        "other markup", '<function_calls><invoke name="f">', "vllm#30541", content='<function_calls><invoke name="f">'
    ),
    Shape("V4's markup", "<｜DSML｜tool_calls>x", "frontend-crates#252", content="<｜DSML｜tool_calls>x"),
    Shape("other bars", "<|DSML| calls>x", "local-inference-lab/vllm#417", content="<|DSML| calls>x"),
    Shape("markdown", "```xml\n<a>b</a>\n```\n| x | y |", "derived", content="```xml\n<a>b</a>\n```\n| x | y |"),
    Shape("emoji", "😀 é 雪", "derived", content="😀 é 雪"),
    # cut off
    Shape("cut in the opening", "Look:\n\n<｜DSML｜ calls>", "hermes#93156", content="Look:\n\n"),
    Shape(
        "cut behind the name's beginning",
        f'Look:\n\n{BEGIN}<｜DSML｜ invoke name="',
        "dynamo#10518",
        content="Look:\n\n",
    ),
    Shape("cut in the end of the block", f"\n\n{ONE[:-3]}", "dynamo#10518", calls=GIVEN),
]

#: Of vLLM 0.30.0's parser, which serves here: what it does otherwise than it should. Expected to fail, so that a
#: version that mends one is noticed.
FAULTS = [
    Shape(
        "markup in prose",
        "The tag <｜DSML｜ calls> opens a block.",
        "vllm#54686",
        content="The tag <｜DSML｜ calls> opens a block.",
    ),
    Shape(
        "an invoke in prose",
        'Write <｜DSML｜ invoke name="note"> to call.',
        "vllm#55954",
        content='Write <｜DSML｜ invoke name="note"> to call.',
    ),
    Shape("markup without tools", "a <｜DSML｜ calls> b", "derived", content="a <｜DSML｜ calls> b", tools=False),
    Shape(
        "markup in a thought",
        "I write <｜DSML｜ calls> then</think>Four.",
        "sglang#32539",
        "I write <｜DSML｜ calls> then",
        "Four.",
        thinking=True,
    ),
    Shape("text behind an empty block", f"a\n\n{BEGIN}{END}\nb", "vllm#56184", content="a\n\n\nb"),
    Shape(
        "a tag for thoughts in an answer",
        "a</think>use <think>x</think> tags",
        "tabbyAPI#295",
        "a",
        "use <think>x</think> tags",
        thinking=True,
    ),
    Shape("a space in the tag", ONE.replace('"note">', '"note" >'), "sglang#40236", calls=GIVEN),
    Shape(
        "an invoke that is not closed before the next",
        BEGIN + invoke("note") + text("s", "v") + invoke("stop") + CLOSE + END,
        "qvac#3668",
        calls=[*GIVEN, ("stop", {})],
    ),
    argument("no string attribute", '<｜DSML｜ parameter name="i">3</｜DSML｜ parameter>\n', {"i": 3}, "sglang#39435"),
    argument("a JSON body", '{"s": "v"}\n', {"s": "v"}, "sglang#39434"),
    argument(
        "a parameter that is not closed", '<｜DSML｜ parameter name="s" string="true">v\n', {"s": "v"}, "vllm#53227"
    ),
    argument("a name twice", text("s", "a") + text("s", "b"), {"s": "b"}, "derived"),
    argument("an object as a string, for all", text("arguments", '{"s": "v"}'), {"s": "v"}, "sglang#39344"),
]
