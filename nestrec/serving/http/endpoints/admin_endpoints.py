"""Admin endpoints: swap models, roll back to the previous models, drain an instance, and list the served models."""

from collections.abc import Callable, Mapping
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_schema import DrainRequest, RollbackRequest, SwapRequest
from nestrec.serving.inputs.responses import DeploymentResponse, LoadedModelInfo
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.service.model_reloader import LoadedModel, Reloader, on_daemon_thread

_CONFLICT = 409


async def swap(context: HandlerContext, request: SwapRequest) -> DeploymentResponse:
    """Swap the models; responds when the new ones serve. If one of them cannot be loaded, none is swapped."""
    return await _apply_change(context, lambda reloader: reloader.swap(request.models))


async def rollback(context: HandlerContext, _: RollbackRequest) -> DeploymentResponse:
    """Roll back the last swap; responds when the previous models serve again."""
    return await _apply_change(context, lambda reloader: reloader.rollback())


async def drain(context: HandlerContext, request: DrainRequest) -> DeploymentResponse:
    """Start or stop draining: the readiness probe fails, but requests that still arrive are served."""
    context.service.is_draining = request.drain is not False
    return _fleet(context)


async def fleet(context: HandlerContext, _: Any) -> DeploymentResponse:
    return _fleet(context)


async def _apply_change(context: HandlerContext, change: Callable[[Reloader], None]) -> DeploymentResponse:
    """Apply a change on a separate thread, because it can take long; return the served models afterwards."""
    reloader = context.reloader
    if reloader is None:
        raise BadRequestError("this server cannot change its models", status=_CONFLICT)
    try:
        await on_daemon_thread(lambda: change(reloader))
    except UserError as error:
        message = error.problem if error.option is None else error.message
        raise BadRequestError(message, status=_CONFLICT, remedy=error.remedy or "") from error
    except OSError as error:
        raise BadRequestError(str(error), status=_CONFLICT) from error
    return _fleet(context)


def _fleet(context: HandlerContext) -> DeploymentResponse:
    reloader = context.reloader
    return {
        "models": {} if reloader is None else _all(reloader.current),
        "previous": {} if reloader is None else _all(reloader.previous),
        "draining": context.service.is_draining,
    }


def _all(models: Mapping[str, LoadedModel]) -> dict[str, LoadedModelInfo]:
    return {
        role: {"version": short_version(loaded.version), "folder": loaded.folder} for role, loaded in models.items()
    }


SWAP = EndpointSpec(
    method="POST",
    path="/v1/admin/swap",
    summary="Swap models",
    handle=swap,
    request=SwapRequest,
    response=DeploymentResponse,
    admin=True,
    example={"models": ["models/new"]},
)
ROLLBACK = EndpointSpec(
    method="POST",
    path="/v1/admin/rollback",
    summary="Roll back to the models before the last swap",
    handle=rollback,
    request=RollbackRequest,
    response=DeploymentResponse,
    admin=True,
)
DRAIN = EndpointSpec(
    method="POST",
    path="/v1/admin/drain",
    summary="Drain this instance: its readiness probe fails, so that load balancers route users elsewhere",
    handle=drain,
    request=DrainRequest,
    response=DeploymentResponse,
    admin=True,
)
FLEET = EndpointSpec(
    method="GET",
    path="/v1/admin/fleet",
    summary="List the served models, and those that a rollback restores",
    handle=fleet,
    response=DeploymentResponse,
    admin=True,
)
