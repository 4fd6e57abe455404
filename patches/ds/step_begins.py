"""Time the steps that ``"when": "auto"`` compares from their first forward pass on."""

from __future__ import annotations

from typing import Any

from hybridcomp.session.engine_session import EngineSession

#: attribute of a session with the handle of the hook
HOOK = "_step_begins"


def watch(engine: Any, session: EngineSession) -> None:
    """Call ``session.begin_step`` in training forward passes, as long as it may compare steps.

    This is a forward pre-hook, the only place that runs in all engines, pipelines included, before
    a step communicates. A pass in eval mode may be a validation, so it is not counted as a
    start: if a module trains in eval mode, a step begins where the previous one ended. A second
    call, after a load, replaces the hook of the first.
    """
    stop(session)

    def begins(module: Any, *_: Any) -> None:
        if module.training and not session.begin_step():
            hook.remove()

    hook = engine.module.register_forward_pre_hook(begins)
    setattr(session, HOOK, hook)


def stop(session: EngineSession) -> None:
    """Remove the hook: the model may get another engine."""
    if (hook := vars(session).get(HOOK)) is not None:
        hook.remove()
