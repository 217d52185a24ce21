"""One copy of a table that several processes register, each for itself, and what happens when some do not live."""

from __future__ import annotations

import pytest
from engram.shared import Members
from engram.tables import write_tables

pytestmark = pytest.mark.long
ROWS = {1: 600_001, 4: 30_000}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), ROWS)


@pytest.fixture
def runtime(overlay):
    return str(overlay / "lib" / "libascendcl.so")


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_register_one_copy(checkpoint, tmp_path, runtime, ranks):
    with Members(ranks, tmp_path, checkpoint, ROWS, runtime) as members:
        files = members.wait("made")
        assert len(files[0]) == 4
        assert all(found == files[0] for found in files)
        reports = members.wait("loaded")
        assert all(
            "registered host memory" in line and f"for {ranks} ranks" in line for report in reports for line in report
        )
        members.tell("look up")
        assert all(members.wait("looked up"))
        members.tell("stop")
        assert members.wait("closed") == [[]] * ranks
        members.ended()


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (8, 5)])
def test_one_is_killed(checkpoint, tmp_path, runtime, ranks, victim):
    with Members(ranks, tmp_path, checkpoint, ROWS, runtime, slow=True) as members:
        members.wait("made")  # all of them: the writer may be ahead of others
        members.wait("loading", [0])
        others = members.kill(victim)
        assert all(text.startswith("PeerError: loading the table") for text in members.wait("failed", others))
        members.ended()


@pytest.mark.parametrize("victim", [0, 1])
def test_one_is_killed_while_serving(checkpoint, tmp_path, runtime, victim):
    with Members(2, tmp_path, checkpoint, ROWS, runtime) as members:
        members.wait("loaded")
        others = members.kill(victim)
        members.tell("look up", others)
        assert members.wait("looked up", others) == [True]
        members.tell("stop", others)
        assert members.wait("closed", others) == [[]]
        members.ended()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", [1, 5, 10])
def test_one_is_refused(checkpoint, tmp_path, runtime, victim, call):
    """By the runtime, at the probe, at an early or at the last block: nobody goes on."""
    with Members(2, tmp_path, checkpoint, ROWS, runtime, refusals={victim: ("aclrtHostRegisterV2", call)}) as members:
        said = members.wait("failed")
        assert said[victim].startswith("AclError: aclrtHostRegisterV2 returned 507899")
        assert said[1 - victim].startswith("PeerError: ")
        assert said[1 - victim].endswith(f"rank {victim}: {said[victim]}")
        members.ended()
