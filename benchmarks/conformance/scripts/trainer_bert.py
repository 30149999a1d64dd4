"""transformers' Trainer: dropout, dynamic padding, accumulation, cosine rates, metrics, resuming."""

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import set_seed

torch.set_default_dtype(torch.float64)
set_seed(42)
generator = torch.Generator().manual_seed(0)
rows = []
for i in range(57):
    length = int(torch.randint(3, 9, (1,), generator=generator))
    ids = torch.randint(5, 30, (length,), generator=generator).tolist()
    rows.append({"input_ids": [2, *([7, 7] if i % 3 == 0 else []), *ids], "labels": i % 3})


class Collator:
    """Pads to the longest of a batch."""

    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        ids = [f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]
        mask = [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features]
        labels = torch.tensor([f["labels"] for f in features])
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": labels}


def compute_metrics(found):
    predictions = np.argmax(found.predictions, axis=1)
    return {
        "accuracy": float((predictions == found.label_ids).mean()),
        "logits": float(np.abs(found.predictions).mean()),
    }


class Printer(TrainerCallback):
    """Prints what is logged, to all digits."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {k: v for k, v in logs.items() if not k.endswith(("runtime", "per_second", "total_flos"))}
        print(" ".join(f"{k} {v:.10g}" for k, v in shown.items()))


sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **sizes)).double()
args = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=5,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    weight_decay=0.01,
    logging_steps=1,
    logging_nan_inf_filter=False,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=4,
)
trainer = Trainer(
    model,
    args,
    train_dataset=rows[:40],
    eval_dataset=rows[40:],
    data_collator=Collator(),
    compute_metrics=compute_metrics,
    callbacks=[Printer()],
)
trainer.remove_callback(PrinterCallback)
result = trainer.train()
print(f"trained {result.training_loss:.10g}")
print({k: f"{v:.10g}" for k, v in trainer.evaluate().items() if k.endswith(("loss", "accuracy"))})
trainer.train(resume_from_checkpoint="out/checkpoint-8")
predictions = trainer.predict(rows[40:])
print(f"predictions {predictions.predictions.shape} {predictions.predictions.std():.10g}")
print(f"norms {sum(p.norm() for p in trainer.model.parameters()):.10g}")
