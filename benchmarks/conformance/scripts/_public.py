"""Which script here stands for which of the 34 public training scripts by which `fxdp run` is judged.

Loop, losses, metrics, evaluation and saving are the public script's, in words of our own, on data that is
made up. Two of the scripts stand for one: the word language model has two networks.
"""

PUBLIC = {
    "accelerate_images": "Accelerate's example of image classification",
    "accelerate_pairs": "Accelerate's example of sentence pairs",
    "dcgan": "PyTorch's DCGAN",
    "deep_q": "PyTorch's tutorial of deep Q-learning",
    "detection": "a detection transformer",
    "diffusion_transformer": "a diffusion transformer",
    "generation": "x-transformers' byte language model",
    "gpt_accumulation": "a GPT script",
    "graph_isomorphism": "a graph isomorphism network",
    "imagenet": "PyTorch's ImageNet",
    "kan": "a Kolmogorov-Arnold network",
    "lightning_cli": "LightningCLI",
    "masked_autoencoder": "a masked autoencoder",
    "mnist": "PyTorch's MNIST",
    "nerf": "a radiance field",
    "neural_ode": "a neural differential equation",
    "normalizing_flow": "a normalizing flow with BatchNorm",
    "ppo": "PPO in one file",
    "reinforce": "PyTorch's REINFORCE",
    "resnet_cifar": "a ResNet on CIFAR",
    "self_distillation": "self-distillation",
    "siamese": "PyTorch's siamese network",
    "simclr": "SimCLR",
    "simsiam": "SimSiam",
    "sine_lbfgs": "PyTorch's sine waves",
    "small_gpt_trainer": "a small GPT with a trainer class",
    "style_transfer": "PyTorch's fast style transfer",
    "super_resolution": "PyTorch's super-resolution",
    "translation": "PyTorch's tutorial of translation",
    "unet_dice": "a U-Net",
    "vae": "PyTorch's VAE",
    "vq_codebook": "a VQ codebook",
    "wgan_gp": "WGAN with gradient penalty",
    "word_rnn": "PyTorch's word language model",
    "word_transformer": "PyTorch's word language model",
}
