"""Trained models in folders and repositories of the Hugging Face Hub, through the mixin of huggingface_hub.

model.safetensors     the weights with their card, a file that `unfading.load` reads
config.json           the run, for readers; nothing is built from it
README.md             the model card

Nothing is pickled. A folder is written and read without a network.
"""

import json
from pathlib import Path
from typing import Any, Self

try:
    from huggingface_hub import ModelCard, PyTorchModelHubMixin, hf_hub_download
except ImportError:
    raise ImportError("models on the Hub need huggingface_hub: pip install 'unfading[hub]'.") from None

from unfading.training.trained_model import TrainedModel
from unfading.training.weights import PRETRAINED, load, save_model


class HubModel(PyTorchModelHubMixin, TrainedModel):  # type: ignore[misc]  # huggingface_hub may not be there
    """A trained model with the methods of huggingface_hub: `save_pretrained`, `from_pretrained`, `push_to_hub`.

    Args:
        model: the trained model, whose modules are taken.
    """

    def __init__(self, model: TrainedModel):
        TrainedModel.__init__(self, model, model.run, model.record)
        self.card = model.card
        self._hub_mixin_config = {"library": "unfading", **self.run.to_json()}

    def _save_pretrained(self, save_directory: Path) -> None:
        save_model(self, save_directory / PRETRAINED)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **classes: Any,
    ) -> Self:
        if Path(model_id).is_dir():
            return cls(load(Path(model_id) / PRETRAINED, **classes))
        options = {"revision": revision, "cache_dir": cache_dir, "force_download": force_download, "token": token}
        path = hf_hub_download(repo_id=model_id, filename=PRETRAINED, local_files_only=local_files_only, **options)
        return cls(load(path, **classes))

    def generate_model_card(self, *arguments: Any, **options: Any) -> Any:
        """The README.md of a repository: what was trained, its scores, and how to load it."""
        run, scores = self.run, self.scores
        lines = [
            "---",
            "library_name: unfading",
            "tags: [recurrent-neural-network, time-series, pytorch, unfading]",
            "---",
            f"# {run.cell} on {run.task}",
            "",
            "A recurrent network, trained with [unfading](https://pypi.org/project/unfading/):",
            "",
            *("| metric | test |", "|---|---|", *(f"| {name} | {value:.5g} |" for name, value in scores.items()), ""),
            *("```python", "import unfading", "", 'model = unfading.TrainedModel.from_pretrained("REPOSITORY")'),
            *("model.predict(X)  # X [sequences, steps, channels]", "```", ""),
            *("The run that trained it:", "", "```json", json.dumps(run.to_json(), indent=2, sort_keys=True), "```", ""),
        ]
        return ModelCard("\n".join(lines if scores else [line for line in lines if not line.startswith("|")]))

    @property
    def scores(self) -> dict[str, float]:
        """The finite scores of the test, by name."""
        test = ((self.record or self.card or {}).get("test")) or {}
        return {name: value for name, value in test.items() if value is not None}
