"""A Wasserstein GAN with gradient penalty: derivatives of derivatives, several critic steps."""

import torch
from sklearn.datasets import load_digits
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
LATENT, LAMBDA, N_CRITIC = 6, 10, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()

        def block(inputs, outputs, normalize=True):
            layers = [nn.Linear(inputs, outputs, bias=not normalize)]
            if normalize:
                layers.append(nn.BatchNorm1d(outputs, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(*block(LATENT, 16, False), *block(16, 24), nn.Linear(24, 64), nn.Tanh())

    def forward(self, z):
        return self.model(z).view(z.shape[0], 1, 8, 8)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 24), nn.LeakyReLU(0.2, inplace=True), nn.Linear(24, 1))

    def forward(self, img):
        return self.model(img.view(img.shape[0], -1))


def compute_gradient_penalty(critic, real_samples, fake_samples):
    alpha = torch.rand((real_samples.size(0), 1, 1, 1))
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = critic(interpolates)
    fake = torch.ones(real_samples.shape[0], 1)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


images = torch.tensor(load_digits().images[:74] / 8 - 1).unsqueeze(1)
loader = DataLoader(TensorDataset(images), batch_size=9, shuffle=True)
generator, critic = Generator(), Critic()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
batches_done = 0
for epoch in range(2):
    for i, (imgs,) in enumerate(loader):
        optimizer_d.zero_grad()
        z = torch.randn(imgs.shape[0], LATENT)
        fake_imgs = generator(z)
        real_validity = critic(imgs)
        fake_validity = critic(fake_imgs)
        penalty = compute_gradient_penalty(critic, imgs.data, fake_imgs.data)
        d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + LAMBDA * penalty
        d_loss.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        if i % N_CRITIC == 0:
            fake_imgs = generator(z)
            g_loss = -torch.mean(critic(fake_imgs))
            g_loss.backward()
            optimizer_g.step()
            print(
                f"[{epoch}/{2}] [{i}/{len(loader)}] D {d_loss.item():.10g} G {g_loss.item():.10g} "
                f"penalty {penalty.item():.10g}"
            )
            if batches_done % 6 == 0:
                torch.save(fake_imgs.data[:25], f"{batches_done}.pt")
            batches_done += N_CRITIC
print(f"norms {sum(p.norm() for m in (generator, critic) for p in m.parameters()):.10g}")
