"""What whoever runs the server asks of it while it serves: other models, the ones before, to let users go."""

from collections.abc import Callable, Mapping
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_schema import DrainRequest, RollbackRequest, SwapRequest
from nestrec.serving.inputs.responses import DeploymentResponse, LoadedModelInfo
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.service.model_reloader import LoadedModel, Reloader, on_daemon_thread

_CONFLICT = 409


async def swap(front: HandlerContext, request: SwapRequest) -> DeploymentResponse:
    """Answered when the models of these folders serve; where one will not do, all stay as they are."""
    return await _changed(front, lambda reloader: reloader.swap(request.models))


async def rollback(front: HandlerContext, _: RollbackRequest) -> DeploymentResponse:
    """Answered when what the last swap has replaced serves again."""
    return await _changed(front, lambda reloader: reloader.rollback())


async def drain(front: HandlerContext, request: DrainRequest) -> DeploymentResponse:
    """Requests that come all the same are served."""
    front.service.is_draining = request.drain is not False
    return _fleet(front)


async def fleet(front: HandlerContext, _: Any) -> DeploymentResponse:
    return _fleet(front)


async def _changed(front: HandlerContext, change: Callable[[Reloader], None]) -> DeploymentResponse:
    """Apply a change, which takes its time, on a thread of its own."""
    reloader = front.reloader
    if reloader is None:
        raise BadRequestError("the models of this server stay as they are", status=_CONFLICT)
    try:
        await on_daemon_thread(lambda: change(reloader))
    except UserError as error:
        remedy = error.remedy or ""
        message = str(error).removesuffix(f"\n  remedy: {remedy}")
        raise BadRequestError(message, status=_CONFLICT, remedy=remedy) from error
    except OSError as error:
        raise BadRequestError(str(error), status=_CONFLICT) from error
    return _fleet(front)


def _fleet(front: HandlerContext) -> DeploymentResponse:
    reloader = front.reloader
    return {
        "models": {} if reloader is None else _all(reloader.current),
        "previous": {} if reloader is None else _all(reloader.previous),
        "draining": front.service.is_draining,
    }


def _all(models: Mapping[str, LoadedModel]) -> dict[str, LoadedModelInfo]:
    return {
        role: {"version": shown_version(loaded.version), "folder": loaded.folder} for role, loaded in models.items()
    }


SWAP = EndpointSpec(
    method="POST",
    path="/v1/admin/swap",
    summary="Serve other models",
    handle=swap,
    request=SwapRequest,
    answer=DeploymentResponse,
    admin=True,
    example={"models": ["models/new"]},
)
ROLLBACK = EndpointSpec(
    method="POST",
    path="/v1/admin/rollback",
    summary="Serve the models of before the last swap",
    handle=rollback,
    request=RollbackRequest,
    answer=DeploymentResponse,
    admin=True,
)
DRAIN = EndpointSpec(
    method="POST",
    path="/v1/admin/drain",
    summary="Say that this server is not ready, so that users go elsewhere",
    handle=drain,
    request=DrainRequest,
    answer=DeploymentResponse,
    admin=True,
)
FLEET = EndpointSpec(
    method="GET",
    path="/v1/admin/fleet",
    summary="What is served, and what a rollback would bring back",
    handle=fleet,
    answer=DeploymentResponse,
    admin=True,
)
