"""Classification by Accelerate: frozen layers, one-cycle rates, gathered metrics, saved state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
config = {"lr": 3e-3, "num_epochs": 2, "seed": 42, "batch_size": 10}


def build_model():
    body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 4))
    model = nn.Sequential(body, head)
    for param in model[0][0].parameters():
        param.requires_grad = False
    return model


def training_function(config):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(config["seed"])
    labels = torch.randint(4, (61,))
    images = torch.randn(4, 3, 8, 8)[labels] + torch.randn(61, 3, 8, 8)
    mean, std = torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    train_set, eval_set = TensorDataset(images[:41], labels[:41]), TensorDataset(images[41:], labels[41:])
    train_dataloader = DataLoader(train_set, shuffle=True, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(eval_set, shuffle=False, batch_size=8)
    model = build_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params=trainable, lr=config["lr"] / 25)
    steps = config["num_epochs"] * len(train_dataloader)
    lr_scheduler = OneCycleLR(optimizer, max_lr=config["lr"], epochs=1, steps_per_epoch=steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = 0
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                inputs = (batch[0].to(accelerator.device) - mean) / std
                outputs = model(inputs)
                loss = F.cross_entropy(outputs, batch[1])
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            accelerator.print(
                f"step {overall_step} loss {loss:.10g} rate {lr_scheduler.get_last_lr()[0]:.10g}"
            )
        model.eval()
        accurate, num_elems = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model((batch[0] - mean) / std)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch[1]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        eval_metric = accurate.item() / num_elems
        mean_loss = total_loss.item() / len(train_dataloader)
        accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f} of {num_elems}, loss {mean_loss:.5g}")
        if epoch == 0:
            accelerator.save_state("state")
    unwrapped = accelerator.unwrap_model(model)
    accelerator.print(f"norms {sum(p.norm() for p in unwrapped.parameters()):.10g}")
    accelerator.load_state("state")
    accelerator.print(f"norms before {sum(p.norm() for p in unwrapped.parameters()):.10g}")


if __name__ == "__main__":
    training_function(config)
