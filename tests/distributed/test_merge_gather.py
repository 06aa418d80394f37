"""Gather shards from other nodes through a real sshd with tools/merge_checkpoint.py."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from rl.export import folders, gather
from tests.checkpoint_files import Made, read_model, write_checkpoint
from tests.sshd import SshServer, ssh_server
from tools.merge_checkpoint import main

TENSORS = {"w": np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)}  # 4 MiB
NUM_SHARDS = 8
SHARD_BYTES = TENSORS["w"].nbytes // NUM_SHARDS
SLACK_BYTES = 96 << 10  # traffic of ssh itself and of listings


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with ssh_server(tmp_path) as server:
        yield server


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Two shards on each of four nodes; this machine is node0."""
    monkeypatch.setattr(gather, "PAUSE_S", 0.05)
    monkeypatch.setattr("socket.gethostname", lambda: "node0")
    return write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(4)], TENSORS, NUM_SHARDS)


def arguments(server: SshServer, *more: str | Path) -> list[str]:
    options = ["--ssh", server.command, "--identity", str(server.identity), "--ssh-user", "root"]
    return [*options, *map(str, more)]


def failure(arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    return str(error.value.code)


def check(made: Made, merged: Path) -> None:
    (array,) = read_model(merged).values()
    assert array.tobytes() == TENSORS["w"].tobytes()
    assert list(merged.parent.iterdir()) == [merged], "gathered copies are deleted"
    for node in range(4):
        assert len(list(made.step_folder(node).glob("model-*"))) == 2, "the run's own shards stay where they are"


def test_the_checkpoint_records_its_hosts(made: Made, server: SshServer) -> None:
    """Only model shards and hf/ are fetched, and only those that are not here."""
    main(arguments(server, made.folders[0]))
    check(made, made.folders[0] / "merged/step_40")
    assert 6 * SHARD_BYTES < server.num_bytes < 6 * SHARD_BYTES + SLACK_BYTES


def test_all_files_come_from_the_nodes_that_are_named(made: Made, server: SshServer, tmp_path: Path) -> None:
    """This machine has nothing of the run. Entries have host names or a user and address, and come from a file too."""
    entries = [f"node{node}:{made.folders[node]}" for node in (0, 1)]
    listed = tmp_path / "nodes"
    listed.write_text(f"root@127.0.0.1:{made.folders[2]}  # the third\n\nnode3:{made.folders[3]}/checkpoints\n")
    here = tmp_path / "here"
    main(arguments(server, here, "--nodes", ",".join(entries), "--nodes-file", listed, "--step", "40", "--keep-shards"))
    (array,) = read_model(here / "merged/step_40").values()
    assert array.tobytes() == TENSORS["w"].tobytes()
    kept = list((here / "merged").glob("step_40.work-*/shards/step_40/model-*"))
    assert len(kept) == NUM_SHARDS
    before = server.num_bytes
    shutil.rmtree(here / "merged/step_40")
    main(arguments(server, here, "--nodes", ",".join(entries), "--nodes-file", listed))
    check(made, here / "merged/step_40")
    assert server.num_bytes - before < SLACK_BYTES, "kept shards are not fetched again"


def test_an_interrupted_transfer_continues(made: Made, server: SshServer) -> None:
    server.cut(SHARD_BYTES // 2, num_connections=3)
    main(arguments(server, made.folders[0]))
    check(made, made.folders[0] / "merged/step_40")
    # A cut connection loses what the server has sent but nobody has received.
    assert server.num_bytes < 6 * SHARD_BYTES + 4 * SLACK_BYTES, "bytes that had arrived were fetched again"


def test_a_node_that_goes_away_and_returns(made: Made, server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command fetches the rest."""
    monkeypatch.setattr(gather, "MAX_TRIES", 1)
    server.cut(SHARD_BYTES // 2, num_connections=1000)
    merged = made.folders[0] / "merged"
    text = failure(arguments(server, made.folders[0]))
    assert "files did not arrive; the others are kept. Run the command again to continue" in text
    assert "node1:" in text and "is it up" in text
    kept = sum(path.stat().st_size for path in merged.rglob("model-*"))
    assert kept > 0 and not (merged / "step_40").exists()
    server.cut(0, num_connections=0)
    before = server.num_bytes
    main(arguments(server, made.folders[0]))
    check(made, merged / "step_40")
    assert server.num_bytes - before < 6 * SHARD_BYTES - kept + SLACK_BYTES


def test_an_unreachable_node_and_a_refused_key(made: Made, server: SshServer) -> None:
    refused = ["--ssh", server.command, "--identity", str(server.other_identity), str(made.folders[0])]
    text = failure(refused)
    assert "model-00002-of-00008.safetensors" in text and "should be on node1" in text
    assert "node1:" in text and "Permission denied" in text and "--identity KEY" in text
    server.stop()
    text = failure(arguments(server, made.folders[0]))
    assert "Connection refused" in text and "is it up" in text and "--nodes HOST:FOLDER" in text
    assert not (made.folders[0] / "merged").exists()
    server.start()
    text = failure(arguments(server, made.folders[0], "--nodes", f"node1:/nowhere/x,node2:{made.folders[2]}"))
    assert "node1:/nowhere/x" in text and "give the run's folder on that node with --nodes" in text
    assert "model-00004" not in text, "node2 has it"


def test_a_copy_that_is_corrupt_at_its_source(made: Made, server: SshServer, tmp_path: Path) -> None:
    path = made.shard(5)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    text = failure(arguments(server, made.folders[0]))
    place = f"node2:{made.folders[2]}/checkpoints"
    assert f"model-00005-of-00008.safetensors: {place}: its bytes differ from those that were saved" in text
    second = tmp_path / "second" / "x"
    shutil.copytree(made.folders[2], second)
    data[-1] ^= 1
    (second / "checkpoints/step_40" / path.name).write_bytes(data)
    nodes = [f"node{node}:{folder}" for node, folder in enumerate([made.folders[1], made.folders[2], second], 1)]
    main(arguments(server, made.folders[0], "--nodes", ",".join([*nodes, f"node4:{made.folders[3]}"])))
    assert read_model(made.folders[0] / "merged/step_40")["w"].tobytes() == TENSORS["w"].tobytes()


def test_a_gathered_shard_that_becomes_corrupt_is_fetched_again(made: Made, server: SshServer) -> None:
    main(arguments(server, made.folders[0], "--keep-shards"))
    (rotten,) = made.folders[0].glob("merged/*/shards/step_40/model-00003-*")
    data = bytearray(rotten.read_bytes())
    data[-1] ^= 1
    rotten.write_bytes(data)
    shutil.rmtree(made.folders[0] / "merged/step_40")
    before = server.num_bytes
    main(arguments(server, made.folders[0]))
    check(made, made.folders[0] / "merged/step_40")
    assert server.num_bytes - before < SHARD_BYTES + SLACK_BYTES


def test_missing_space_for_gathering_is_reported(
    made: Made, server: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered shards and the result would each fit, but not both."""
    monkeypatch.setattr("rl.export.work_folder.free_bytes", lambda path: 9 * SHARD_BYTES)
    assert "are to be written to" in failure(arguments(server, made.folders[0]))
    assert server.num_bytes < SLACK_BYTES


def test_a_dry_run_prints_what_it_would_fetch(
    made: Made, server: SshServer, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments(server, made.folders[0], "--dry-run"))
    text = capsys.readouterr().out
    assert "would gather 6 files, 3.15 MB, from node1:" in text and "node3:" in text
    assert server.num_bytes < SLACK_BYTES and not (made.folders[0] / "merged").exists()


def test_output_of_a_login_shell_is_ignored(made: Made, server: SshServer, tmp_path: Path) -> None:
    """A .bashrc may contain an echo."""
    script = tmp_path / "greeting-ssh"
    script.write_text(f'#!/bin/sh\necho "Welcome to node1"\nexec {server.command} "$@"\n')
    script.chmod(0o755)
    options = ["--ssh", str(script), "--identity", str(server.identity), "--ssh-user", "root"]
    main([*options, str(made.folders[0])])
    check(made, made.folders[0] / "merged/step_40")


def test_more_than_1024_files_may_be_open(made: Made, tmp_path: Path) -> None:
    """Every shard on this machine stays open meanwhile."""
    script = tmp_path / "local-ssh"
    script.write_text("#!/bin/sh\nexec sh -s\n")
    script.chmod(0o755)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
        for _ in range(1100):
            stack.enter_context(Path("/dev/null").open())
        main(["--ssh", str(script), str(made.folders[0])])
    check(made, made.folders[0] / "merged/step_40")


def test_a_stalled_stream_is_abandoned(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in place of ssh lists files, and then sends one byte of a file and no more."""
    monkeypatch.setattr(folders, "SILENCE_S", 0.5)
    monkeypatch.setattr(folders, "POLL_S", 0.1)
    monkeypatch.setattr(gather, "MAX_TRIES", 1)
    script = tmp_path / "stalling-ssh"
    stall = "echo oneworld begin; printf x; exec sleep 60"
    script.write_text(f'#!/bin/sh\nall=$(cat)\ncase "$all" in *"tail -c"*) {stall};; *) echo "$all" | sh;; esac\n')
    script.chmod(0o755)
    text = failure(["--ssh", str(script), str(made.folders[0])])
    assert "6 of 6 files did not arrive" in text and "no data for" in text
