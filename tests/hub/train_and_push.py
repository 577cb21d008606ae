"""A run that publishes model and traces: `train_and_push.py MODEL OUTPUT`, with HF_ENDPOINT and HF_TOKEN set."""

import logging
import sys

from tests.trainers.conftest import checksum_reward, sums
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

logging.basicConfig(level=logging.DEBUG)  # whatever any library would say, a token included
model, output = sys.argv[1:]
args = SupportReplayGRPOConfig(
    output_dir=f"{output}/run",
    use_cpu=True,
    bf16=False,
    report_to=[],
    disable_tqdm=True,
    max_steps=2,
    top_p=0.9,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    logging_steps=1,
    save_strategy="no",
    push_to_hub=True,
    hub_model_id="me/chars-grpo",
    hub_private_repo=True,
    save_traces=f"{output}/traces",
    traces_hub_id="me/chars-traces",
)
trainer = SupportReplayGRPOTrainer(model, checksum_reward, args, train_dataset=sums())
trainer.train()
trainer.push_to_hub(dataset_name="me/sums")
