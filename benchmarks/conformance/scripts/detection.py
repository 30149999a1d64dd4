"""A small detection transformer: Hungarian matching, three losses, lists of targets."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(42)
CLASSES, QUERIES = 3, 5


class Boxes(Dataset):
    """Pictures with one to three boxes each."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(size, 3, 8, 8, generator=generator)
        counts = torch.randint(1, 4, (size,), generator=generator).tolist()
        self.boxes = [torch.rand(n, 4, generator=generator) * 0.5 + 0.1 for n in counts]
        self.labels = [torch.randint(CLASSES, (n,), generator=generator) for n in counts]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], {"boxes": self.boxes[i], "labels": self.labels[i]}


def collate_fn(batch):
    images, targets = zip(*batch, strict=True)
    return torch.stack(images), list(targets)


class DETR(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.backbone = nn.Conv2d(3, dim, 2, 2)
        self.transformer = nn.Transformer(dim, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.query_embed, self.pos = nn.Embedding(QUERIES, dim), nn.Parameter(torch.rand(16, dim))
        self.class_embed, self.bbox_embed = nn.Linear(dim, CLASSES + 1), nn.Linear(dim, 4)

    def forward(self, x):
        src = self.backbone(x).flatten(2).permute(0, 2, 1) + self.pos
        queries = self.query_embed.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        hs = self.transformer(src, queries)
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


def corners(x):
    cx, cy, w, h = x.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], dim=-1)


def pairwise_iou(a, b):
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(2)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    return inter / (area_a[:, None] + area_b - inter)


@torch.no_grad()
def matcher(outputs, targets):
    bs, num_queries = outputs["pred_logits"].shape[:2]
    out_prob = outputs["pred_logits"].flatten(0, 1).softmax(-1)
    out_bbox = outputs["pred_boxes"].flatten(0, 1)
    tgt_ids = torch.cat([v["labels"] for v in targets])
    tgt_bbox = torch.cat([v["boxes"] for v in targets])
    cost_bbox = torch.cdist(out_bbox, tgt_bbox, p=1)
    cost = 5 * cost_bbox - out_prob[:, tgt_ids] - 2 * pairwise_iou(corners(out_bbox), corners(tgt_bbox))
    cost = cost.view(bs, num_queries, -1).cpu()
    sizes = [len(v["boxes"]) for v in targets]
    indices = [linear_sum_assignment(c[i]) for i, c in enumerate(cost.split(sizes, -1))]
    return [(torch.as_tensor(i), torch.as_tensor(j)) for i, j in indices]


def criterion(outputs, targets):
    indices = matcher(outputs, targets)
    batch_idx = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
    idx = batch_idx, torch.cat([src for src, _ in indices])
    num_boxes = sum(len(t["labels"]) for t in targets)
    target_classes_o = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices, strict=True)])
    logits = outputs["pred_logits"]
    target_classes = torch.full(logits.shape[:2], CLASSES, dtype=torch.int64)
    target_classes[idx] = target_classes_o
    weight = torch.ones(CLASSES + 1)
    weight[-1] = 0.1
    loss_ce = F.cross_entropy(logits.transpose(1, 2), target_classes, weight)
    src_boxes = outputs["pred_boxes"][idx]
    target_boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices, strict=True)])
    loss_bbox = F.l1_loss(src_boxes, target_boxes, reduction="none").sum() / num_boxes
    loss_iou = (1 - torch.diag(pairwise_iou(corners(src_boxes), corners(target_boxes)))).sum() / num_boxes
    correct = (logits[idx].argmax(-1) == target_classes_o).double().mean()
    return {"loss_ce": loss_ce, "loss_bbox": loss_bbox, "loss_iou": loss_iou}, correct


loader = DataLoader(Boxes(22), batch_size=6, shuffle=True, collate_fn=collate_fn)
model = DETR()
params = [
    {"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
    {"params": [p for n, p in model.named_parameters() if "backbone" in n], "lr": 1e-4},
]
optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-4)
weights = {"loss_ce": 1, "loss_bbox": 5, "loss_iou": 2}
for epoch in range(2):
    model.train()
    for samples, targets in loader:
        loss_dict, correct = criterion(model(samples), targets)
        losses = sum(loss_dict[k] * weights[k] for k in loss_dict)
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        shown = " ".join(f"{k} {v.item():.10g}" for k, v in loss_dict.items())
        print(f"{epoch} loss {losses.item():.10g} {shown} right {correct.item():.10g}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
