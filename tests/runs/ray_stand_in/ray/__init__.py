"""A stand-in of Ray for one computer: actors are objects, their calls are threads, and each bundle is a machine."""

import concurrent.futures
import json
import time
import types

from ray import exceptions  # noqa: F401

_pool = concurrent.futures.ThreadPoolExecutor(16)


def init(**_):
    """Does nothing: the cluster is this process."""


def remote(**resources):
    assert resources["max_concurrency"] >= 2

    def decorate(cls):
        return types.SimpleNamespace(options=lambda **where: types.SimpleNamespace(remote=lambda: _Actor(cls(), where)))

    return decorate


class _Actor:
    def __init__(self, instance, where):
        strategy = where["scheduling_strategy"]
        assert "STRICT_SPREAD" == strategy.placement_group.strategy
        self._instance, self._rank = instance, strategy.placement_group_bundle_index

    def __getattr__(self, name):
        def call(*args):
            if name == "start" and json.loads(args[0][args[0].index("--plan") + 1])[self._rank][0] == "lost":
                self._instance = _Lost()
            return _pool.submit(getattr(self._instance, name), *args)

        return types.SimpleNamespace(remote=call)


class _Lost:
    def start(self, *_):
        pass

    def wait(self):
        time.sleep(1)  # until the other machine has begun
        raise exceptions.RayActorError("the actor died")


def get(reference):
    return reference.result() if hasattr(reference, "result") else reference


def wait(references, *, num_returns, timeout):
    done, left = concurrent.futures.wait(references, timeout=timeout, return_when="FIRST_COMPLETED")
    return list(done), list(left)
