//! AdamW with gradient clipping, its moments open to checkpoints.
//!
//! candle's own AdamW hides its moments, so a resumed run could not be identical
//! to an uninterrupted one.

use candle_core::{DType, Result, Tensor, Var};

use crate::config::TrainConfig;

/// AdamW (Loshchilov and Hutter 2019, algorithm 2) over a fixed list of variables.
#[derive(Debug)]
pub struct AdamW {
    /// First moments, one per variable.
    pub first: Vec<Tensor>,
    /// Second moments, one per variable.
    pub second: Vec<Tensor>,
    /// Optimiser steps taken.
    pub steps: u64,
}

impl AdamW {
    /// Zero moments for these variables.
    pub fn new(variables: &[Var]) -> Result<Self> {
        let zeros = || {
            variables
                .iter()
                .map(|v| Tensor::zeros(v.shape(), DType::F32, v.device()))
                .collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            first: zeros()?,
            second: zeros()?,
            steps: 0,
        })
    }

    /// One step at `learning_rate`; `gradients[i]` belongs to `variables[i]`,
    /// `None` counts as zero.
    pub fn step(
        &mut self,
        variables: &[Var],
        gradients: &[Option<Tensor>],
        learning_rate: f64,
        config: &TrainConfig,
    ) -> Result<()> {
        self.steps += 1;
        let (b1, b2) = (config.adam_beta1, config.adam_beta2);
        let correction1 = 1.0 - b1.powf(self.steps as f64);
        let correction2 = 1.0 - b2.powf(self.steps as f64);
        for (i, variable) in variables.iter().enumerate() {
            let (mut first, mut second) = ((&self.first[i] * b1)?, (&self.second[i] * b2)?);
            if let Some(gradient) = &gradients[i] {
                first = (first + (gradient * (1.0 - b1))?)?;
                second = (second + (gradient.sqr()? * (1.0 - b2))?)?;
            }
            let scale = ((&second / correction2)?.sqrt()? + config.adam_epsilon)?;
            let update = ((&first / correction1)? / scale)?;
            let decayed = (variable.as_tensor() * (1.0 - learning_rate * config.weight_decay))?;
            variable.set(&(decayed - (update * learning_rate)?)?)?;
            self.first[i] = first.detach();
            self.second[i] = second.detach();
        }
        Ok(())
    }
}

/// Scales gradients down so that their joint norm is at most `max_norm`; returns
/// the norm before.
///
/// The squares are summed in double precision and in the order of the variables,
/// so that the result does not depend on the number of threads.
pub fn clip_norm(gradients: &mut [Option<Tensor>], max_norm: f64) -> Result<f64> {
    let mut sum = 0.0;
    for gradient in gradients.iter().flatten() {
        for value in gradient.flatten_all()?.to_vec1::<f32>()? {
            sum += f64::from(value).powi(2);
        }
    }
    let norm = sum.sqrt();
    if norm > max_norm {
        let scale = max_norm / norm;
        for gradient in gradients.iter_mut().flatten() {
            *gradient = (&*gradient * scale)?;
        }
    }
    Ok(norm)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};
    use candle_nn::optim::{Optimizer, ParamsAdamW};
    use spotter_core::train::Dial;

    use super::{AdamW, clip_norm};
    use crate::config::TrainConfig;

    #[test]
    fn steps_are_those_of_candles_adamw() {
        let start = Tensor::new(&[0.5f32, -1.0, 2.0], &Device::Cpu).expect("tensor");
        let (ours, theirs) = (Var::from_tensor(&start), Var::from_tensor(&start));
        let (ours, theirs) = (ours.expect("var"), theirs.expect("var"));
        let mut config = TrainConfig::for_dial(Dial::Normal);
        config.weight_decay = 0.1;
        let params = ParamsAdamW {
            lr: 0.05,
            beta1: config.adam_beta1,
            beta2: config.adam_beta2,
            eps: config.adam_epsilon,
            weight_decay: config.weight_decay,
        };
        let mut reference = candle_nn::AdamW::new(vec![theirs.clone()], params).expect("optimiser");
        let mut adam = AdamW::new(std::slice::from_ref(&ours)).expect("optimiser");
        for _ in 0..5 {
            let loss = theirs.sqr().and_then(|x| x.sum_all()).expect("loss");
            reference.backward_step(&loss).expect("step");
            let gradient = (ours.as_tensor() * 2.0).expect("gradient").detach();
            adam.step(
                std::slice::from_ref(&ours),
                &[Some(gradient)],
                0.05,
                &config,
            )
            .expect("step");
        }
        let (a, b) = (ours.to_vec1::<f32>(), theirs.to_vec1::<f32>());
        for (a, b) in a.expect("values").iter().zip(b.expect("values")) {
            assert!((a - b).abs() < 1e-5, "{a} is not {b}");
        }
    }

    #[test]
    fn the_norm_is_clipped_over_all_gradients_together() {
        let mut gradients = vec![
            Some(Tensor::new(&[3.0f32], &Device::Cpu).expect("tensor")),
            None,
            Some(Tensor::new(&[4.0f32], &Device::Cpu).expect("tensor")),
        ];
        assert_eq!(clip_norm(&mut gradients, 1.0).expect("norm"), 5.0);
        let after = clip_norm(&mut gradients, 1.0).expect("norm");
        assert!((after - 1.0).abs() < 1e-6);
    }
}
