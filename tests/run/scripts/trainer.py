"""transformers' Trainer: dynamic padding, accumulation, a schedule, evaluation with metrics."""

import logging

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

logging.disable(logging.WARNING)
set_seed(0)
torch.set_default_dtype(torch.float64)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, n):
        self.words = [torch.randint(1, 40, (3 + i * 5 % 7,)).tolist() for i in range(n)]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.words[i][0] % 3}


def collate(samples):
    longest = max(len(s["input_ids"]) for s in samples)
    ids = torch.tensor([s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples])
    labels = torch.tensor([s["labels"] for s in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print({k: round(v, 9) for k, v in logs.items() if "runtime" not in k and "per_second" not in k})


def metrics(prediction):
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


config = BertConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=16, num_labels=3,
)  # fmt: skip
trainer = Trainer(
    BertForSequenceClassification(config),
    TrainingArguments(
        "/tmp/never_written", num_train_epochs=2, per_device_train_batch_size=3, logging_steps=1,
        gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=1, learning_rate=1e-3,
        eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    data_collator=collate, train_dataset=Sentences(10), eval_dataset=Sentences(7),
    compute_metrics=metrics, callbacks=[Printed()],
)  # fmt: skip
trainer.remove_callback(PrinterCallback)
trainer.train()
print("parameters", sum(p.double().abs().sum().item() for p in trainer.model.parameters()))
