"""A rank that trains with the Python package, for daemon_test.py: it goes on from the last step for five more."""

import torch

import holdfast

model = torch.nn.Linear(8, 1)
checkpointer = holdfast.Checkpointer("python-job")
start = checkpointer.restore({"model": model})
print(f"starts at step {start}", flush=True)
for step in range(start, start + 5):
    with torch.no_grad():
        model.weight.fill_(step)
    handle = checkpointer.save(step, {"model": model})
handle.wait("committed")
print(f"saved {step}", flush=True)
