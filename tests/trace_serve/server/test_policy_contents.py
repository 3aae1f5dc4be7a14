"""A policy with anything in it that is not a policy's is refused before an engine could start."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from trace_serve.errors import PolicyError
from trace_serve.policy.contents import check_contents
from trace_serve.policy.manifest import Policy
from trace_serve.server.authorization import authorize_policy


@pytest.fixture
def policy(fp4_policy: Policy, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(fp4_policy.path, tmp_path / "policy"))


def write(name: str, content: bytes = b"x") -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return edit


def link(name: str, target: str) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)

    return edit


def pipe(root: Path) -> None:
    os.mkfifo(root / "queue.json")


def listener(root: Path) -> None:
    here = Path.cwd()
    os.chdir(root)  # a path longer than 107 bytes is no address
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("listener.json")
    finally:
        os.chdir(here)


def replaced_by_link(root: Path) -> None:
    outside = root.parent / "outside.json"
    shutil.move(root / "config.json", outside)
    (root / "config.json").symlink_to(outside)


def index_outside(name: str) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        shutil.copy(root / "model.safetensors", root.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


SHAPES: dict[str, Callable[[Path], None]] = {
    "python": write("modeling_evil.py"),
    "python in a directory": write("code/modeling_evil.py"),
    "upper case": write("MODEL.PY"),
    "pickle": write("pytorch_model.bin"),
    "checkpoint": write("original/consolidated.00.pth"),
    "library": write("kernel.so"),
    "shell": write("install.sh"),
    "archive": write("extra.tar.gz"),
    "no suffix": write("Makefile"),
    "double suffix": write("config.json.py"),
    "hidden": write(".env"),
    "hidden directory": write(".git/config.json"),
    "hidden deep": write("assets/.secret/notes.txt"),
    "link out": link("notes.txt", "/etc/passwd"),
    "link up": link("notes.txt", "../outside.txt"),
    "link inside": link("notes.txt", "config.json"),
    "broken link": link("notes.txt", "nowhere"),
    "link to a directory": link("assets", "/etc"),
    "link to itself": link("loop", "."),
    "config behind a link": replaced_by_link,
    "pipe": pipe,
    "socket": listener,
    "shard by a path upwards": index_outside("../outside.safetensors"),
    "shard by an absolute path": index_outside("/etc/passwd"),
    "shard by another way to the same": index_outside("./model.safetensors"),
}


def test_the_policy_itself_is_authorised(policy: Path) -> None:
    write("LICENSE")(policy)
    write("README.md")(policy)
    write("assets/notes.txt")(policy)
    assert authorize_policy(policy, mode="rollout").name == "tiny"


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_no_part_of_a_policy_is_refused(policy: Path, shape: str) -> None:
    SHAPES[shape](policy)
    with pytest.raises(PolicyError) as caught:
        authorize_policy(policy, mode="rollout")
    assert caught.value.exit_code == 3


def test_the_message_names_the_file_and_what_to_do(policy: Path) -> None:
    write("code/modeling_evil.py")(policy)
    with pytest.raises(PolicyError, match=r"code/modeling_evil\.py .*remove it") as caught:
        check_contents(policy)
    assert caught.value.field == "code/modeling_evil.py"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "policy.json"])
def test_a_file_that_is_a_directory_is_refused(policy: Path, name: str) -> None:
    (policy / name).unlink()
    (policy / name).mkdir()
    with pytest.raises(PolicyError):
        authorize_policy(policy, mode="rollout")
