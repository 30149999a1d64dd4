"""Self-distillation: crops of two sizes, teacher by exponential average, centered outputs."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
OUT, EPOCHS = 16, 2


class Crops(Dataset):
    """Two large crops and three small ones of each picture."""

    def __init__(self, size):
        self.data = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, crops = self.data[index], []
        for size in (8, 8, 4, 4, 4):
            top, left = torch.randint(9 - size, (2,)).tolist()
            crops.append(image[:, top : top + size, left : left + size] + 0.1 * torch.randn(3, size, size))
        return crops, 0


class MultiCropWrapper(nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x):
        if not isinstance(x, list):
            x = [x]
        sizes = torch.tensor([inp.shape[-1] for inp in x])
        idx_crops = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start_idx, output = 0, torch.empty(0)
        for end_idx in idx_crops:
            out = self.backbone(torch.cat(x[start_idx:end_idx]))
            output = torch.cat((output, out))
            start_idx = end_idx
        return self.head(output)


class DINOHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 6))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, OUT, bias=False))

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class DINOLoss(nn.Module):
    def __init__(self, ncrops, epochs, student_temp=0.1, center_momentum=0.9):
        super().__init__()
        self.student_temp, self.center_momentum, self.ncrops = student_temp, center_momentum, ncrops
        self.register_buffer("center", torch.zeros(1, OUT))
        self.teacher_temp_schedule = np.linspace(0.04, 0.07, epochs)

    def forward(self, student_output, teacher_output, epoch):
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        temp = self.teacher_temp_schedule[epoch]
        teacher_out = F.softmax((teacher_output - self.center) / temp, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1)
                total_loss += loss.mean()
                n_loss_terms += 1
        self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
student = MultiCropWrapper(backbone, DINOHead())
teacher = copy.deepcopy(student)
teacher.load_state_dict(student.state_dict())
for p in teacher.parameters():
    p.requires_grad = False
loader = DataLoader(Crops(27), batch_size=7, shuffle=True)
dino_loss = DINOLoss(5, EPOCHS)
regularized = [p for p in student.parameters() if p.dim() > 1]
rest = [p for p in student.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": regularized}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
momentum = 1 - 0.04 * (np.cos(np.pi * np.arange(EPOCHS * len(loader)) / (EPOCHS * len(loader))) + 1) / 2
for epoch in range(EPOCHS):
    for it, (images, _) in enumerate(loader):
        it = len(loader) * epoch + it
        teacher_output = teacher(images[:2])
        student_output = student(images)
        loss = dino_loss(student_output, teacher_output, epoch)
        if not np.isfinite(loss.item()):
            raise SystemExit("Loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        norms = [p.grad.data.norm(2).item() for p in student.parameters() if p.grad is not None]
        if epoch < 1:
            for n, p in student.named_parameters():
                if "last_layer" in n:
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            m = momentum[it]
            for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
        print(f"{epoch} {it} loss {loss.item():.10g} norm {max(norms):.10g}")
print(f"center {dino_loss.center.norm().item():.10g}")
print(f"norms {sum(p.norm() for m in (student, teacher) for p in m.parameters()):.10g}")
