"""An energy-based model: Langevin samples from a buffer, gradients of inputs; sliced score matching beside it."""

import random

import numpy as np
import torch
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(4), random.seed(4), np.random.seed(4)


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class Energy(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=1, padding=2), Swish(), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            Swish(), nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), Swish(), nn.Flatten(),
            nn.Linear(2 * width * 9, 12), Swish(), nn.Linear(12, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x).squeeze(dim=-1)


class Sampler:
    def __init__(self, model, shape, sample_size, max_len=40):
        self.model, self.shape, self.sample_size, self.max_len = model, shape, sample_size, max_len
        self.examples = [torch.rand((1, *shape)) * 2 - 1 for _ in range(sample_size)]

    def sample_new(self, steps=5, step_size=2.0):
        n_new = np.random.binomial(self.sample_size, 0.05)
        rand = torch.rand((n_new, *self.shape)) * 2 - 1
        old = torch.cat(random.choices(self.examples, k=self.sample_size - n_new), dim=0)
        images = torch.cat([rand, old], dim=0).detach()
        images = Sampler.generate(self.model, images, steps, step_size)
        self.examples = list(images.chunk(self.sample_size, dim=0)) + self.examples
        self.examples = self.examples[: self.max_len]
        return images

    @staticmethod
    def generate(model, inp, steps, step_size, every=False):
        training = model.training
        model.eval()
        for p in model.parameters():
            p.requires_grad = False
        inp.requires_grad = True
        had = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        noise, kept = torch.randn(inp.shape), []
        for _ in range(steps):
            noise.normal_(0, 0.005)
            inp.data.add_(noise.data)
            inp.data.clamp_(min=-1.0, max=1.0)
            out = -model(inp)
            out.sum().backward()
            inp.grad.data.clamp_(-0.03, 0.03)
            inp.data.add_(-step_size * inp.grad.data)
            inp.grad.detach_()
            inp.grad.zero_()
            inp.data.clamp_(min=-1.0, max=1.0)
            if every:
                kept.append(inp.clone().detach())
        for p in model.parameters():
            p.requires_grad = True
        model.train(training)
        torch.set_grad_enabled(had)
        return torch.stack(kept, dim=0) if every else inp


grid = torch.linspace(-1, 1, 7)
centers = torch.rand(37, 2) - 0.5
pictures = torch.exp(-4 * ((grid[None, :, None] - centers[:, :1, None]) ** 2 + (grid[None, None] - centers[:, 1:, None]) ** 2))
loader = DataLoader(TensorDataset(2 * pictures.unsqueeze(1) - 1), batch_size=8, shuffle=True)
model = Energy()
sampler = Sampler(model, (1, 7, 7), sample_size=8)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.0, 0.999))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)
for epoch in range(2):
    for (real,) in loader:
        real.add_(torch.randn_like(real) * 0.005).clamp_(min=-1.0, max=1.0)
        fake = sampler.sample_new(steps=6)
        real_out, fake_out = model(torch.cat([real, fake], dim=0)).split([len(real), len(fake)])
        reg = 0.1 * ((real_out**2).mean() + (fake_out**2).mean())
        divergence = fake_out.mean() - real_out.mean()
        loss = reg + divergence
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        print(f"{epoch} loss {loss.item():.10g} divergence {divergence.item():.10g} norm {norm.item():.10g}")
    scheduler.step()
start = torch.rand((5, 1, 7, 7), generator=torch.Generator().manual_seed(2)) * 2 - 1
steps = Sampler.generate(model, start, steps=4, step_size=3.0, every=True)
print("chain", " ".join(f"{s.mean().item():.10g}" for s in steps), len(sampler.examples))
for (real,) in DataLoader(TensorDataset(pictures[:11, None]), batch_size=11):
    real.requires_grad_()
    energies = model(real)
    (grads,) = autograd.grad(energies, real, grad_outputs=torch.ones_like(energies))
    print(f"ascent {grads.flatten(1).norm(dim=1).mean().item():.10g} at {grads.abs().argmax().item()}")


def sliced_score_matching(score, samples, n_particles=2):
    dup = samples.unsqueeze(0).expand(n_particles, *samples.shape).contiguous().view(-1, *samples.shape[1:])
    dup.requires_grad_(True)
    vectors = torch.randn_like(dup).sign()
    grad1 = score(dup)
    loss1 = 0.5 * (grad1**2).sum(-1)
    grad2 = autograd.grad((grad1 * vectors).sum(), dup, create_graph=True)[0]
    loss2 = (vectors * grad2).sum(-1)
    return loss1.view(n_particles, -1).mean(0).mean(), loss2.view(n_particles, -1).mean(0).mean()


class Score(nn.Module):
    """The gradient of an energy, taken inside of forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x):
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.requires_grad_(True)
            return -autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


angle = torch.rand(43) * 6.28318
ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(43, 2)
score = Score()
optimizer = torch.optim.RMSprop(score.parameters(), lr=1e-3)
for epoch in range(2):
    for (points,) in DataLoader(TensorDataset(ring), batch_size=12, shuffle=True):
        first, second = sliced_score_matching(score, points)
        loss = first + second
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"score {epoch} {first.item():.10g} {second.item():.10g}")
x = torch.zeros(9, 2)
for t in np.geomspace(0.1, 0.01, 4):
    x = x + 0.5 * t * score(x).detach() + np.sqrt(t) * torch.randn_like(x)
print(f"annealed {x.norm(dim=1).mean().item():.10g}")
print(f"norms {sum(p.norm().item() for p in [*model.parameters(), *score.parameters()]):.10g}")
