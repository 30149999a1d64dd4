"""A deep convolutional GAN: two networks, two optimizers, labels by torch.full, fixed noise."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(999)
nz, ngf, ndf, nc = 10, 6, 6, 1
images = torch.tensor(load_digits().images[:97] / 8 - 1).unsqueeze(1)
dataloader = DataLoader(TensorDataset(images), batch_size=12, shuffle=True, num_workers=0)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


generator = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ngf),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
    nn.Sigmoid(),
)
generator.apply(weights_init)
critic.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(16, nz, 1, 1)
real_label, fake_label = 1.0, 0.0
optimizer_d = optim.Adam(critic.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizer_g = optim.Adam(generator.parameters(), lr=0.0002, betas=(0.5, 0.999))
g_losses, d_losses = [], []

for epoch in range(2):
    for i, data in enumerate(dataloader, 0):
        critic.zero_grad()
        real = data[0]
        b_size = real.size(0)
        label = torch.full((b_size,), real_label, dtype=torch.float64)
        output = critic(real).view(-1)
        err_d_real = criterion(output, label)
        err_d_real.backward()
        d_x = output.mean().item()

        noise = torch.randn(b_size, nz, 1, 1)
        fake = generator(noise)
        label.fill_(fake_label)
        output = critic(fake.detach()).view(-1)
        err_d_fake = criterion(output, label)
        err_d_fake.backward()
        d_g_z1 = output.mean().item()
        err_d = err_d_real + err_d_fake
        optimizer_d.step()

        generator.zero_grad()
        label.fill_(real_label)
        output = critic(fake).view(-1)
        err_g = criterion(output, label)
        err_g.backward()
        d_g_z2 = output.mean().item()
        optimizer_g.step()
        if i % 3 == 0:
            print(
                f"[{epoch}][{i}/{len(dataloader)}] Loss_D: {err_d.item():.10g} Loss_G: {err_g.item():.10g} "
                f"D(x): {d_x:.10g} D(G(z)): {d_g_z1:.10g} / {d_g_z2:.10g}"
            )
        g_losses.append(err_g.item())
        d_losses.append(err_d.item())
    with torch.no_grad():
        pictures = generator(fixed_noise).detach().cpu()
    print(f"pictures {pictures.std().item():.10g}")
    torch.save(generator.state_dict(), f"netG_epoch_{epoch}.pth")
print(f"losses {sum(g_losses):.10g} {sum(d_losses):.10g}")
print(f"norms {sum(p.norm() for m in (critic, generator) for p in m.parameters()):.10g}")
