"""The promises of ``interface.py`` as checks: parts that pass them are a backend.

Each public coroutine of ``EngineContract``, ``ReferenceContract`` and ``TrainerContract`` is one promise. The promises
of one contract share a started object, may run in any order, and leave it usable for the next. With pytest::

    @pytest.mark.parametrize("promise", promises(EngineContract))
    def test_an_engine_keeps_its_promises(contract, runner, promise):
        runner.run(asyncio.wait_for(getattr(contract, promise)(), 60))

``pytest.register_assert_rewrite("backends.contract")`` before the import makes failures show values.
"""
