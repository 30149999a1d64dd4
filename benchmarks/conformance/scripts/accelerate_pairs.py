"""Sentence pairs by BERT and Accelerate: batches padded to their longest pair, F1."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.metrics import accuracy_score, f1_score
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.set_default_dtype(torch.float64)
MAX_BATCH, BATCH, EVAL_BATCH = 8, 16, 12


def get_dataloaders():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(75):
        lengths = torch.randint(2, 7, (2,), generator=generator).tolist()
        first, second = (torch.randint(5, 40, (n,), generator=generator).tolist() for n in lengths)
        second = first[:3] + second if i % 2 else second
        ids = [2, *first, 3, *second, 3]
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        rows.append({"input_ids": ids, "token_type_ids": types, "labels": i % 2})

    def collate_fn(examples):
        longest = max(len(e["input_ids"]) for e in examples)

        def padded(key):
            return torch.tensor([e[key] + [0] * (longest - len(e[key])) for e in examples])

        mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
        batch = {key: padded(key) for key in ("input_ids", "token_type_ids")}
        return batch | {
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor([e["labels"] for e in examples]),
        }

    train = DataLoader(rows[:50], shuffle=True, collate_fn=collate_fn, batch_size=MAX_BATCH, drop_last=True)
    return train, DataLoader(rows[50:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH)


def training_function():
    accumulation = BATCH // MAX_BATCH
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders()
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=2, **sizes)).double()
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=2e-3)
    steps = (len(train_dataloader) * 2) // accumulation
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    for epoch in range(2):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device) if hasattr(batch, "to") else batch
            outputs = model(**batch)
            loss = outputs.loss / accumulation
            accelerator.backward(loss)
            if step % accumulation == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            accelerator.print(f"{epoch}.{step} length {batch['input_ids'].shape[1]} loss {loss.item():.10g}")
        model.eval()
        every, truth = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            every += predictions.tolist()
            truth += references.tolist()
        accelerator.print(f"epoch {epoch}: {accuracy_score(truth, every):.10g} {f1_score(truth, every):.10g}")
    accelerator.print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")


if __name__ == "__main__":
    training_function()
