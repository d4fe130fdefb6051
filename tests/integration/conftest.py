"""A run started as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest_runs import Start, family


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a run as a user would; a run that its test leaves behind is killed, lest it slow the tests after it."""
    started = []

    def start(folder: Path, config: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "counterflow.cli", "run", str(config), *overrides],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            left = [*family(process), psutil.Process(process.pid)]
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.communicate(timeout=60)
            psutil.wait_procs(left, timeout=60)


@pytest.fixture
def three_cores() -> Iterator[str]:
    """The address of a Ray cluster with room for a learner and two actors, however few cores there are."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    yield cluster.address
    cluster.shutdown()
