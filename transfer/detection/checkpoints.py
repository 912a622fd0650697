"""Detectron2's checkpoints, written whole or not at all."""

from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer

from instdisc.errors import UserError
from instdisc.runs.checkpoint import DamagedFile, load_file, set_aside, torch_file
from instdisc.runs.folders import write_text

KEPT = 2


class AtomicCheckpointer(DetectionCheckpointer):
    """The usual files (model_0000999.pth, last_checkpoint); each appears complete, synced.

    The last `KEPT` and model_final.pth stay.
    """

    def save(self, name: str, **kwargs: Any) -> None:
        """Writes model, trainer state and `kwargs`, then makes it the last checkpoint."""
        if not (self.save_dir and self.save_to_disk):
            return
        content: dict[str, Any] = {"model": self.model.state_dict()}
        content.update((key, part.state_dict()) for key, part in self.checkpointables.items())
        content.update(kwargs)
        folder = Path(self.save_dir)
        with torch_file(folder / f"{name}.pth") as file:
            torch.save(content, file)
        self.tag_last_checkpoint(f"{name}.pth")
        for old in sorted(folder.glob("model_[0-9]*.pth"))[:-KEPT]:
            old.unlink()

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Names the file to go on from."""
        write_text(Path(self.save_dir) / "last_checkpoint", last_filename_basename)

    def last(self) -> Path | None:
        """The newest checkpoint that loads; a damaged one is set aside with its end `.damaged`.

        Raises:
            UserError: there are checkpoints and none loads.
        """
        folder = Path(self.save_dir)
        found = [
            path
            for path in (*sorted(folder.glob("model_[0-9]*.pth")), folder / "model_final.pth")
            if path.is_file()
        ]
        for path in reversed(found):
            try:
                load_file(path, mapped=True)
                return path
            except DamagedFile as error:
                self.logger.warning(f"{error}; it is set aside ({set_aside(path).name})")
            except UserError:
                if path.exists():  # else another process has set it aside
                    raise
        if found:
            raise UserError(f"no checkpoint in {folder} loads: start again with --no-resume")
        return None
