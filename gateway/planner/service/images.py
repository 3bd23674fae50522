"""Engines of foreign images, and engine versions without a profile."""

from __future__ import annotations

from gateway.domain import EngineRef, Wish
from gateway.domain.image_name import AllowedImages
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.learned_profile import learn
from gateway.errors import BadRequest, HostError
from gateway.profiles.profiles import Profiles

# Python starts and reads the installed packages; the engine is not imported.
_NAME_S = 30.0


async def add_image_engine(
    wish: Wish, allowed_images: AllowedImages | None, profiles: Profiles, inquirer: Inquirer
) -> Wish:
    """The wish with the engine of its image, if it names only the image.

    allowed_images: images that may start; None if engines are processes.

    Raises BadRequest for an image that may not be started, and HostError for an image that cannot
    be asked.
    """
    if wish.image is None:
        return wish
    if allowed_images is None:
        engine = wish.engines[0] if wish.engines and "==" in wish.engines[0] else "KIND==VERSION"
        raise BadRequest(
            f"The image {wish.image} cannot be started: engines are processes on this machine"
            " (FITSERVE_HOST_KIND).",
            hint=(
                f"Install the version with `fitserve engine install {engine}`, or use your own"
                f" environment with `fitserve engine learn {engine} --python VENV/bin/python`, or"
                " run the gateway with Docker."
            ),
            param="image",
        )
    if not allowed_images.allows(wish.image):
        message, hint = allowed_images.refusal(wish.image)
        raise BadRequest(message, hint=hint, param="image")
    kind, mark, _ = (wish.engines[0] if wish.engines else "").partition("==")
    if mark:
        return wish
    # An agent requires an engine kind, which is not known yet: any kind will do.
    newest_ref = next(iter(profiles.engine_files)).partition("==")
    try:
        engine_ref = await inquirer.installed_engine(
            EngineRef(kind=newest_ref[0], version=newest_ref[2], image=wish.image), _NAME_S
        )
    except HostError as error:
        raise HostError(
            error.message, hint=f"{error.hint} Or name the engine in it: --engine KIND==VERSION."
        ) from None
    if kind not in ("", engine_ref.kind):
        raise BadRequest(
            f"The image {wish.image} holds {engine_ref}, not {kind}.",
            hint=f"Omit --engine, or name {engine_ref}.",
            param="engines",
        )
    return wish.evolve(engines=(str(engine_ref),))


async def learn_engine(
    engine: EngineRef, profiles: Profiles, inquirer: Inquirer, limit_s: float
) -> bool:
    """Ask an engine without a profile for its properties, before any question about a model.

    Returns whether a profile was learned. Raises HostError.
    """
    if not profiles.needs_description(engine):
        return False
    exact_ref, identity = await inquirer.identify(engine)
    if profiles.has_learned(exact_ref, identity):
        return False
    await learn(
        inquirer,
        profiles.nearest(str(exact_ref)),
        exact_ref,
        profiles.learned_in(exact_ref),
        limit_s,
    )
    return True
