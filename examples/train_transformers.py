"""A tiny GPT-2 under Hugging Face's Trainer. Kill it at any moment, start it again: the losses are those of a run left alone.

    python examples/train_transformers.py                        # one process
    torchrun --nproc-per-node 2 examples/train_transformers.py   # DistributedDataParallel

It needs transformers 5.3 or newer, and accelerate.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from holdfast.integrations.transformers import HoldfastCallback  # [holdfast]

parser = argparse.ArgumentParser()
parser.add_argument("--job", default="tiny-gpt2", help="its name: the same at every start")
parser.add_argument("--output", default="tiny-gpt2", help="directory for the log's history")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

set_seed(0)
texts = [torch.arange(n, n + 16) % 50 for n in range(64)]
data = [{"input_ids": text, "labels": text} for text in texts]
size = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **size))
args = TrainingArguments(
    output_dir=options.output,
    use_cpu=not torch.cuda.is_available(),
    num_train_epochs=options.epochs,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no",  # the Trainer's own checkpoints are not needed
    report_to="none",
)
trainer = Trainer(model, args, train_dataset=data)

checkpoints = HoldfastCallback(trainer, options.job)  # [holdfast]
trainer.train(resume_from_checkpoint=checkpoints.last_checkpoint())  # [holdfast]
if checkpoints.preempted:
    raise SystemExit(75)  # the scheduler starts the same command again
trainer.save_state()  # the losses of all steps, also of those before the last start
