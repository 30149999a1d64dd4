"""Lightning with manual optimization: two networks, two optimizers, logged sums, clipping."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
seed_everything(7, verbose=False)


class GAN(LightningModule):
    def __init__(self, latent_dim: int = 5, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 12, bias=False),
            nn.BatchNorm1d(12),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(12, 8),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(8, 12), nn.LeakyReLU(0.2, inplace=True), nn.Linear(12, 1)
        )
        self.validation_z = torch.randn(6, latent_dim)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (rows,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(rows.shape[0], self.hparams.latent_dim)
        z = z.type_as(rows)
        self.toggle_optimizer(optimizer_g)
        generated = self.generator(z)
        valid = torch.ones(rows.size(0), 1).type_as(rows)
        g_loss = self.adversarial_loss(self.discriminator(generated), valid)
        self.log("g_loss", g_loss, on_epoch=True, on_step=False)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(rows), valid)
        fake = torch.zeros(rows.size(0), 1).type_as(rows)
        fake_loss = self.adversarial_loss(self.discriminator(self.generator(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, on_epoch=True, on_step=False)
        self.log("samples", float(len(rows)), reduce_fx="sum", on_epoch=True, on_step=False)
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        sample = self.generator(self.validation_z.type_as(self.generator[0].weight))
        self.log("sample", sample.mean())

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [opt_g, torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr)], []


class Printer(Callback):
    def on_train_epoch_end(self, trainer, module):
        print(" ".join(f"{k} {float(v):.10g}" for k, v in sorted(trainer.callback_metrics.items())))


loader = DataLoader(TensorDataset(torch.randn(44, 8) * 0.5 + 1), batch_size=7, shuffle=True)
model = GAN()
checkpoint = ModelCheckpoint(dirpath="checkpoints", monitor="g_loss", save_top_k=1)
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Printer(), checkpoint],
)
trainer.fit(model, loader)
print(f"best {float(checkpoint.best_model_score):.10g} at step {trainer.global_step}")
loaded = GAN.load_from_checkpoint(checkpoint.best_model_path, weights_only=False)
print(
    f"norms {sum(p.norm() for p in model.parameters()):.10g} {sum(p.norm() for p in loaded.parameters()):.10g}"
)
