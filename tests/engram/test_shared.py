"""One copy of a table for several processes, and what happens to it when some of them do not live."""

from __future__ import annotations

import os

import pytest

from .shared import Members
from .tables import write_tables

ROWS = {1: 600_001, 4: 30_000}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), ROWS)


EIGHT = pytest.mark.long


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=EIGHT)])
def test_all_use_one_copy(checkpoint, tmp_path, ranks):
    with Members(ranks, tmp_path, checkpoint, ROWS) as members:
        files = members.wait("made")
        assert len(files[0]) == 4  # two tables of two parts
        assert all(found == files[0] for found in files)
        reports = members.wait("loaded")
        assert all(f"one copy for {ranks} ranks" in line for report in reports for line in report)
        assert all("loaded in" not in line for report in reports[1:] for line in report)
        for _ in range(3):
            members.tell("look up")
            assert all(members.wait("looked up"))
        members.tell("stop")
        assert members.wait("closed") == [[]] * ranks
        members.ended()


@pytest.mark.parametrize(
    ("ranks", "victim"), [(2, 0), (2, 1), pytest.param(8, 0, marks=EIGHT), pytest.param(8, 5, marks=EIGHT)]
)
def test_one_is_killed_while_the_table_loads(checkpoint, tmp_path, ranks, victim):
    with Members(ranks, tmp_path, checkpoint, ROWS, slow=True) as members:
        members.wait("made")
        members.wait("loading", [0])
        others = members.kill(victim)
        for text in members.wait("failed", others):
            assert text.startswith("PeerError: loading the table layers.1.engram.embed: another rank ended meanwhile")
        members.ended()


@pytest.mark.parametrize(
    ("ranks", "victim"), [(2, 0), (2, 1), pytest.param(8, 0, marks=EIGHT), pytest.param(8, 7, marks=EIGHT)]
)
def test_one_is_killed_while_serving(checkpoint, tmp_path, ranks, victim):
    """The others keep the copy, whoever made it, and give it back when they end."""
    with Members(ranks, tmp_path, checkpoint, ROWS) as members:
        members.wait("loaded")
        others = members.kill(victim)
        members.tell("look up", others)
        assert all(members.wait("looked up", others))
        members.tell("stop", others)
        assert members.wait("closed", others) == [[]] * (ranks - 1)
        members.ended()


def test_every_rank_learns_that_the_writer_failed(tmp_path):
    checkpoint = write_tables(tmp_path / "tables", ROWS)
    file = tmp_path / "tables" / checkpoint.files["layers.1.engram.embed.scale"]
    os.truncate(file, file.stat().st_size - 8)
    with Members(2, tmp_path, checkpoint, ROWS) as members:
        own, other = members.wait("failed")
        assert own.startswith(f"CheckpointError: {file}: ")
        assert "its header promises" in own
        assert other == f"PeerError: loading the table layers.1.engram.embed: rank 0: {own}"
        members.ended()
