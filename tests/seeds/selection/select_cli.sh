# Distributed training configuration
python hardware_selector.py --model-family text_generation --model-name llama-7b --batch-size 16 --mode training --distributed --gpu-count 8

# With memory constraints
python hardware_selector.py --model-family text_generation --model-name llama-7b --mode training --distributed --gpu-count 8 --max-memory-gb 24
