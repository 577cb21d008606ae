"""What a replaying trainer adds when it writes a model card and pushes to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _TRLTrainer = Any  # one of several
else:
    _TRLTrainer = object


class PublishesTraces(_TRLTrainer):
    """Mixed into a trainer: a section on sampling and replay in its model card, and its saved traces as a dataset."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if (self.replays_support or self.replays_routes) and self.is_world_process_zero():
            from ..hub.model_card import add_section, run_facts

            add_section(Path(str(self.args.output_dir)) / "README.md", run_facts(self))

    def push_to_hub(self, commit_message="End of training", blocking=True, token=None, revision=None, **kwargs):
        if self.args.traces_hub_id is not None and self.args.save_traces is not None:
            self.accelerator.wait_for_everyone()  # every process writes shards
            if self.is_world_process_zero():
                from ..hub.traces import push_traces

                push_traces(
                    self.args.save_traces,
                    self.args.traces_hub_id,
                    token=token or self.args.hub_token,
                    private=self.args.hub_private_repo,
                )
        return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)
