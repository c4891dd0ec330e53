"""A policy that contradicts an option, or that the runtime sends no more, under the real daemon; without --policy."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.domain.errors import Exit
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.daemon import ENVIRONMENT, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.scripted_runtime import Listener, ScriptedRuntime
from tests.support.waiting import aside

PATIENCE_S: Final = 20.0
PROD: Final = '[namespaces]\nallow = ["prod"]\n'  # the pods of these tests are in ml
DENIED: Final = 'namespace "ml" may not ask for GPUs'
KEPT, RELOADED = "policy not reloaded, the old one stays", "policy reloaded"


class Node:
    """A machine with the unit's folders, and the runtime that its daemon serves."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.lib = folder / "policy.toml", folder / "lib"
        self.lib.mkdir()
        self.unit = {"STATE_DIRECTORY": f"{self.lib}:{self.lib}/drivers"}
        root = make_driver_root(folder / "driver")
        socket = folder / "nri.sock"
        self.launch = Launch(folder / "d", socket, default_policy=self.policy, driver_root=root, environment=self.unit)
        self.daemon = NriGpu(self.launch)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedRuntime]:
        """With the daemon started, and killed at the end."""
        async with Listener(self.launch.socket) as listener:
            self.daemon.start()
            try:
                yield await self.connected(listener)
            finally:
                self.daemon.kill()
                self.daemon.__exit__()

    async def connected(self, listener: Listener, config: str = "") -> ScriptedRuntime:
        """config: what the runtime sends by Configure."""
        runtime = await listener.accept(PATIENCE_S)
        await runtime.register(config=config)
        await runtime.synchronize()
        await aside(self.daemon.wait_staged)
        return runtime

    async def reload(self, said: str) -> None:
        """`systemctl reload nri-gpu`."""
        await aside(self.daemon.reload, said)

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*self.daemon.words(), *words, "--state-dir", str(self.launch.state)]
        return subprocess.run(command, env=ENVIRONMENT | self.unit, capture_output=True, text=True, check=False)


@pytest.fixture
def node(folder: Path) -> Node:
    return Node(folder)


async def told(runtime: ScriptedRuntime, name: str = "train") -> str:
    """What a container that asks is told; empty for its GPU. It is gone at once."""
    of = nri.asking("1", name)
    made = nri.container(of)
    reply = await runtime.create(of, made)
    if isinstance(reply, Status):
        return reply.message
    await runtime.event(Event.REMOVE_CONTAINER, of, made)
    return "" if reply.adjust.linux.devices else "ignored"


async def test_an_option_that_the_file_contradicts_is_a_bad_policy_and_no_wrong_option(node: Node) -> None:
    """A wrong option ends the daemon, and its unit does not start it again."""
    node.daemon = NriGpu(replace(node.launch, metrics="0.0.0.0:9464"))
    fault = "command line: --metrics: 0.0.0.0 is not this machine's loopback"
    async with node.serving() as runtime:
        refusal = await told(runtime)
        assert ("[bad-policy]" in refusal, fault in refusal) == (True, True), refusal
        status, check = await aside(node.verb, "status"), await aside(node.verb, "check")
        assert (status.returncode, fault in status.stdout) == (Exit.FINDING, True)
        assert (check.returncode, fault in check.stdout) == (Exit.CONFIGURATION, True)
        node.policy.write_text("[inventory]\nrefresh_s = 7\n[metrics]\npublic = true\n")
        await node.reload(RELOADED)
        needs_restart = 'reloaded policy changes settings that need a restart settings="inventory.refresh_s, [metrics]"'
        await aside(node.daemon.wait_logged, needs_restart)
        assert await told(runtime) == ""
        node.policy.write_text(f"{PROD}[metrics]\npublic = false\n")
        await node.reload(KEPT)
        assert await told(runtime) == ""


async def test_a_policy_that_the_runtime_sends_no_more(node: Node) -> None:
    """The runtime's restart, and the daemon's, over a file by which everybody may."""
    node.policy.write_text("# every default\n")
    async with Listener(node.launch.socket) as listener:
        node.daemon.start()
        runtime = await node.connected(listener, PROD)
        assert DENIED in await told(runtime)
        runtime.close()
        runtime = await node.connected(listener)
        assert DENIED in await told(runtime)
        assert "is not sent any more" in (await aside(node.verb, "status")).stdout
        node.daemon.kill()
        node.daemon.start()
        runtime = await node.connected(listener)
        assert DENIED in await told(runtime)
        node.daemon.kill()
        node.daemon.__exit__()


def summed(text: str) -> str:
    """As `sha256sum` prints it."""
    done = subprocess.run(["sha256sum"], input=text, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


async def test_status_has_the_digest_of_the_text_in_force(node: Node) -> None:
    """Not of the file: one with a fault leaves the text before it in force, over a restart too."""

    async def digest() -> tuple[str, str]:
        """In JSON, and what the page has behind the policy's name."""
        policy, page = (await aside(node.daemon.status))["policy"], (await aside(node.verb, "status")).stdout
        return policy["digest"], page.splitlines()[0].partition(policy["source"])[2]

    async with node.serving():
        assert await digest() == ("", "")
        assert "policy: the built-in defaults\n" in (await aside(node.verb, "status")).stdout
        node.policy.write_text(PROD)
        await node.reload(RELOADED)
        assert await digest() == (summed(PROD), f" ({summed(PROD)[:12]})")
        node.policy.write_text(f"{PROD}deny = 7\n")
        await node.reload(KEPT)
        assert (await digest())[0] == summed(PROD)
    async with node.serving():  # the next daemon
        assert (await digest())[0] == summed(PROD)
        longer = f"{PROD}# caf\u00e9\r\n"
        node.policy.write_bytes(longer.encode())
        await node.reload(RELOADED)
        assert (await digest())[0] == summed(longer)
