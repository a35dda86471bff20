"""The processes that vLLM spawns: they import without garbage collections, and collect afterwards."""

from __future__ import annotations

import gc
import multiprocessing
import sys

from backends.vllm.spawned import imported, main_of_children


def test_what_is_spawned_collects_no_garbage_until_all_is_imported() -> None:
    main, spec = sys.modules["__main__"], sys.modules["__main__"].__spec__
    with main_of_children():
        assert not gc.isenabled()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            before, frozen = pool.apply(gc.isenabled), pool.apply(gc.get_freeze_count)
            pool.apply(imported)
            after = pool.apply(gc.isenabled), pool.apply(gc.get_freeze_count) > 0
    assert (before, frozen, after) == (False, 0, (True, True))
    assert gc.isenabled()
    assert main.__spec__ is spec
    frozen = gc.get_freeze_count()
    imported()
    assert gc.get_freeze_count() == frozen  # this process was not spawned
