"""Adversarial training: FGSM and PGD in the loop, TRADES, free replays; saliency, integrated gradients, influence."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(8)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, x):
        return (x - self.mean) / self.std


def build():
    return nn.Sequential(
        Normalize([0.5, 0.4], [0.3, 0.2]), nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(32, 4),
    ).to(device)  # fmt: skip


labels = torch.randint(4, (51,))
images = (torch.rand(4, 2, 8, 8)[labels] + 0.2 * torch.randn(51, 2, 8, 8)).clamp(0, 1)
train = DataLoader(TensorDataset(images[:37], labels[:37]), batch_size=8, shuffle=True)
test = DataLoader(TensorDataset(images[37:], labels[37:]), batch_size=5)
EPS, ALPHA = 0.06, 0.025


def fgsm_attack(image, epsilon, data_grad):
    return torch.clamp(image + epsilon * data_grad.sign(), 0, 1)


def pgd(model, x, y, steps=3, loss_fn=F.cross_entropy):
    was = model.training
    model.eval()
    delta = torch.empty_like(x).uniform_(-EPS, EPS)
    delta.data = (x + delta.data).clamp(0, 1) - x
    delta.requires_grad = True
    for _ in range(steps):
        loss = loss_fn(model(x + delta), y)
        grad = torch.autograd.grad(loss, delta)[0].detach()
        delta.data = torch.clamp(delta + ALPHA * torch.sign(grad), -EPS, EPS)
        delta.data = (x + delta.data).clamp(0, 1) - x
    model.train(was)
    return (x + delta).detach()


def trades(model, optimizer, x, y, beta=3.0):
    kl = nn.KLDivLoss(reduction="sum")
    model.eval()
    x_adv = x.detach() + 0.001 * torch.randn(x.shape).to(device).detach()
    for _ in range(2):
        x_adv.requires_grad_()
        with torch.enable_grad():
            loss = kl(F.log_softmax(model(x_adv), dim=1), F.softmax(model(x), dim=1))
        grad = torch.autograd.grad(loss, [x_adv])[0]
        x_adv = x_adv.detach() + ALPHA * torch.sign(grad.detach())
        x_adv = torch.min(torch.max(x_adv, x - EPS), x + EPS)
        x_adv = torch.clamp(x_adv, 0.0, 1.0)
    model.train()
    x_adv = torch.autograd.Variable(torch.clamp(x_adv, 0.0, 1.0), requires_grad=False)
    optimizer.zero_grad()
    logits = model(x)
    natural = F.cross_entropy(logits, y)
    robust = (1.0 / x.size(0)) * kl(F.log_softmax(model(x_adv), dim=1), F.softmax(model(x), dim=1))
    return natural + beta * robust


def evaluate(model, name):
    model.eval()
    clean = robust = n = 0
    examples = []
    for data, target in test:
        data, target = data.to(device), target.to(device)
        data.requires_grad = True
        output = model(data)
        init_pred = output.max(1, keepdim=True)[1]
        model.zero_grad()
        F.nll_loss(F.log_softmax(output, 1), target).backward()
        perturbed = fgsm_attack(data, EPS, data.grad.data)
        final = model(perturbed).max(1, keepdim=True)[1]
        clean += init_pred.eq(target.view_as(init_pred)).sum().item()
        robust += final.eq(target.view_as(final)).sum().item()
        n += len(target)
        for i in range(len(target)):
            if init_pred[i].item() == target[i].item() and final[i].item() != target[i].item() and len(examples) < 2:
                examples.append((init_pred[i].item(), final[i].item(), perturbed[i].squeeze().detach().cpu().numpy().mean()))
    print(f"{name}: clean {clean} robust {robust} of {n}", *(f"{a}->{b} {m:.10g}" for a, b, m in examples))


for name in ("pgd", "trades", "free"):
    torch.manual_seed(5)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.08, step_size_up=4)
    delta = torch.zeros(8, 2, 8, 8)
    for epoch in range(2):
        total = n = 0
        for x, y in train:
            x, y = x.to(device), y.to(device)
            if name == "pgd":
                loss = F.cross_entropy(model(pgd(model, x, y)), y)
            elif name == "trades":
                loss = trades(model, optimizer, x, y)
            else:
                for _ in range(2):
                    noise = delta[: x.size(0)].clone().requires_grad_(True)
                    loss = F.cross_entropy(model((x + noise).clamp(0, 1)), y)
                    optimizer.zero_grad()
                    loss.backward()
                    delta[: x.size(0)] += EPS * torch.sign(noise.grad)
                    delta.clamp_(-EPS, EPS)
                    optimizer.step()
            if name != "free":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()
            total, n = total + loss.item() * y.size(0), n + y.size(0)
        print(f"{name} {epoch} loss {total / n:.10g} rate {scheduler.get_last_lr()[0]:.10g} delta {delta.abs().sum():.10g}")
    evaluate(model, name)

x, y = next(iter(test))
x.requires_grad_()
scores = model(x)
scores.gather(1, y.view(-1, 1)).squeeze().backward(torch.ones(len(y)))
saliency, _ = torch.max(x.grad.data.abs(), dim=1)
print(f"saliency {saliency.mean().item():.10g} of {tuple(saliency.shape)} at {saliency.flatten(1).argmax(1).tolist()}")
baseline, total = torch.zeros_like(x), 0
for alpha in torch.linspace(0, 1, 5):
    point = (baseline + alpha * (x - baseline)).detach().requires_grad_()
    total = total + torch.autograd.grad(model(point)[torch.arange(len(y)), y].sum(), point)[0]
integrated = (x - baseline) * total / 5
print("integrated", " ".join(f"{v:.10g}" for v in integrated.flatten(1).sum(1).tolist()))
last = model[-1]
hessian_free = []
for x, y in test:
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(last.parameters()), create_graph=True)
    vector = [p.detach() for p in last.parameters()]
    product = torch.autograd.grad(sum((g * v).sum() for g, v in zip(grads, vector)), list(last.parameters()))
    hessian_free.append(sum(p.pow(2).sum() for p in product).sqrt().item())
print("hessian", " ".join(f"{h:.10g}" for h in hessian_free))
