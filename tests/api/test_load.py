"""Five minutes of everything at once: no error, flat memory, and the answers that each request gets alone."""

from __future__ import annotations

import base64
import io
import random
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from vllm_ascend_dsv41.deploy.check.consistency import hang_up
from vllm_ascend_dsv41.deploy.check.tools import TOOLS

CLIENTS, SECONDS = 32, 300
MIB = 1 << 20


def questions():
    """Name -> call of the service that answers."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
    try:
        import lessons
    finally:
        sys.path.pop(0)
    source = random.Random(5)
    thinking = {"extra_body": {"chat_template_kwargs": {"thinking": True, "reasoning_effort": 12}}}
    made = {}
    for number in range(6):
        said = f"Repeat:\n{lessons.phrase(source)}"
        made[f"text {number}"] = lambda ask, said=said: ask(said)
        made[f"thoughts {number}"] = lambda ask, said=said: ask(said, **thinking)
        city = source.choice(lessons.CITIES)
        made[f"tool {number}"] = lambda ask, city=city: ask(
            f'What is the weather in <city id="1">{city}</city>?', tools=TOOLS
        )
        filler = " ".join(source.choice(lessons.WORDS) for _ in range(200 * number))
        turns = [{"role": "system", "content": filler}, {"role": "user", "content": "Say hello."}]
        made[f"long {number}"] = lambda ask, turns=turns: ask(turns, max_completion_tokens=24)
        buffer = io.BytesIO()
        lessons.digit(source.randrange(10), source).save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which digit is this?"}]
        made[f"picture {number}"] = lambda ask, parts=parts: ask([{"role": "user", "content": parts}])
    return made


def said(answer):
    return answer.content, answer.reasoning, answer.calls, answer.finish


def memory(pid):
    """Resident MiB of the server and its children, shared pages counted once each process."""
    root = psutil.Process(pid)
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) // MIB


@pytest.mark.long
def test_everything_at_once(server, service, talking):
    asked = questions()
    alone = {name: said(one(service.chat)) for name, one in asked.items()}
    deadline, faults, counts = time.monotonic() + SECONDS, [], dict.fromkeys([*asked, "ended"], 0)
    lock = threading.Lock()

    def client(number):
        source = random.Random(number)
        while time.monotonic() < deadline and not faults:
            name = source.choice(list(asked))
            try:
                if source.random() < 0.15:
                    name = "ended"
                    hang_up(service, f"Repeat:\n{number} {source.random()}")
                else:
                    ask = service.stream if source.random() < 0.5 else service.chat
                    found = said(asked[name](ask))
                    if found != alone[name]:
                        faults.append((name, found, alone[name]))
            except Exception as error:  # whatever it is, it is a fault
                faults.append((name, repr(error)))
            with lock:
                counts[name] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    samples = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(5)
        samples.append(memory(server.pid))
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    assert min(counts.values()) > 0, counts
    settled, late = max(samples[len(samples) // 3 : 2 * len(samples) // 3]), max(samples[2 * len(samples) // 3 :])
    print(f"{sum(counts.values())} requests; MiB after a third, two thirds and all of the time: ", end="")
    print(samples[len(samples) // 3], samples[2 * len(samples) // 3], samples[-1])
    assert late <= settled * 1.01 + 16, samples
    assert "Traceback" not in server.log.read_text(errors="replace")
    assert "ERROR" not in server.log.read_text(errors="replace")
