"""One rank of a training run in server mode. `accelerate launch train_worker.py JSON`; writes `rank{i}.json`."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback

from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer


def distinct_letters(completions, **_):
    return [len(set(completion[0]["content"])) / 20 for completion in completions]


class Record(TrainerCallback):
    """What only this rank knows: the weights version of each step."""

    def __init__(self):
        self.trainer, self.versions = None, []

    def on_step_end(self, args, state, control, **kwargs):
        self.versions.append(self.trainer.vllm_generation.weights_version)


def main(config):
    args = SupportReplayGRPOConfig(
        output_dir=config["out"],
        max_steps=config["steps"],
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        per_device_train_batch_size=2,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-5,
        top_k=20,
        top_p=0.9,
        gradient_checkpointing=False,
        **config["settings"],
    )
    prompts = [[{"role": "user", "content": f"Tell me a fact about the number {i}."}] for i in range(64)]
    record = Record()
    trainer = SupportReplayGRPOTrainer(
        config["model"],
        distinct_letters,
        args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[record],
    )
    record.trainer = trainer
    gaps, tokens = [], []
    score = trainer._generate_and_score_completions

    def score_and_record(inputs):
        output = score(inputs)
        tokens.extend(str(ids.tolist()) for ids in output["completion_ids"])
        return output

    trainer._generate_and_score_completions = score_and_record
    compute = trainer._compute_loss

    def compute_and_record(model, inputs):
        loss = compute(model, inputs)
        replayed = trainer._pass.unchecked[0][0] if trainer._pass.unchecked else inputs["old_per_token_logps"]
        mask = inputs["completion_mask"].bool()
        gaps.append((replayed - inputs["sampling_per_token_logps"])[mask].abs().max().item())
        return loss

    trainer._compute_loss = compute_and_record
    trainer.train()
    result = {
        "steps": [entry for entry in trainer.state.log_history if "support/logprob_gap_max" in entry],
        "versions": record.versions,
        "gaps": gaps,
        "tokens": tokens,
    }
    if not trainer.accelerator.is_main_process:
        result["steps"] = [None] * len(record.versions)  # only the main process logs
    Path(config["out"], f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
