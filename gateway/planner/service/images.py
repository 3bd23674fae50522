"""Images that somebody else than an engine's project made, and versions that nobody described:
which engine an image holds, and what it is."""

from __future__ import annotations

from gateway.domain import EngineRef, Wish
from gateway.domain.image_name import AllowedImages
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.learned import learn
from gateway.errors import BadRequest, HostError
from gateway.profiles.profiles import Profiles

# Python starts and reads what is installed; the engine is not imported.
_NAME_S = 30.0


async def named(
    wish: Wish, allowed: AllowedImages | None, profiles: Profiles, inquirer: Inquirer
) -> Wish:
    """The wish with the engine that its image holds, where it names the image alone. allowed: None
    where engines are processes. Raises BadRequest for an
    image that may not be started, and HostError for one that cannot be asked."""
    if wish.image is None:
        return wish
    if allowed is None:
        engine = wish.engines[0] if wish.engines and "==" in wish.engines[0] else "KIND==VERSION"
        raise BadRequest(
            f"The image {wish.image} cannot be started: engines are processes on this machine"
            " (FITSERVE_HOST_KIND).",
            hint=(
                f"Install the version (`fitserve engine install {engine}`), and ask an environment"
                f" of your own with `fitserve engine learn {engine} --python VENV/bin/python`; or"
                " run the gateway with Docker."
            ),
            param="image",
        )
    if not allowed.allows(wish.image):
        message, hint = allowed.refusal(wish.image)
        raise BadRequest(message, hint=hint, param="image")
    kind, mark, _ = (wish.engines[0] if wish.engines else "").partition("==")
    if mark:
        return wish
    # An agent wants to know whose image it is, which is what is asked: any engine's will do.
    newest = next(iter(profiles.engine_files)).partition("==")
    try:
        held = await inquirer.held(
            EngineRef(kind=newest[0], version=newest[2], image=wish.image), _NAME_S
        )
    except HostError as error:
        raise HostError(
            error.message, hint=f"{error.hint} Or name what it holds: --engine KIND==VERSION."
        ) from None
    if kind not in ("", held.kind):
        raise BadRequest(
            f"The image {wish.image} holds {held}, and not {kind}.",
            hint=f"Leave --engine out, or name {held}.",
            param="engines",
        )
    return wish.evolve(engines=(str(held),))


async def hear(engine: EngineRef, profiles: Profiles, inquirer: Inquirer, limit_s: float) -> bool:
    """Before it is asked about a model, an engine that nobody described says what it is. Returns
    whether it did. Raises HostError."""
    if not profiles.undescribed(engine):
        return False
    here, identity = await inquirer.identified(engine)
    if profiles.heard(here, identity):
        return False
    await learn(inquirer, profiles.nearest(str(here)), here, profiles.learned_in(here), limit_s)
    return True
