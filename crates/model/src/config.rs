//! The numbers of an architecture: configuration is data, not copies of code.

use serde::{Deserialize, Serialize};

/// How rotary positions are stretched beyond the trained window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Positions as they are.
    #[default]
    None,
    /// Positions divided by a factor.
    Linear {
        /// The factor, at least 1.
        factor: f32,
    },
    /// The frequency-dependent stretch of Llama 3.1 and later.
    Llama3 {
        /// How far low frequencies are stretched.
        factor: f32,
        /// Low-frequency border, in wavelengths per original window.
        low_freq_factor: f32,
        /// High-frequency border.
        high_freq_factor: f32,
        /// The window before stretching, in tokens.
        original_context: u32,
    },
}

/// A decoder-only transformer of the Llama, Qwen2 or Qwen3 (dense) family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// `llama`, `qwen2` or `qwen3`.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the gated MLP.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// The model's own context window in tokens.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Stretching of rotary positions.
    pub rope_scaling: RopeScaling,
}

impl Config {
    /// Checks that the numbers describe something that can be computed.
    ///
    /// # Errors
    /// A sentence naming the first number that does not fit.
    pub fn check(&self) -> std::result::Result<(), String> {
        let limits: [(&str, usize, usize); 8] = [
            ("embedding length", self.hidden, 1 << 17),
            ("feed-forward length", self.intermediate, 1 << 20),
            ("layer count", self.layers, 1024),
            ("head count", self.heads, 1024),
            ("key/value head count", self.kv_heads, 1024),
            ("head width", self.head_dim, 4096),
            ("vocabulary size", self.vocab, 1 << 22),
            ("context length", self.context, 1 << 26),
        ];
        for (name, value, most) in limits {
            if value == 0 || value > most {
                return Err(format!(
                    "{name} is {value}, which is not between 1 and {most}"
                ));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "{} query heads cannot share {} key/value heads",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head width {} is odd", self.head_dim));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return Err(format!("rope base {} is not usable", self.rope_theta));
        }
        Ok(())
    }

    /// Rotary frequencies (radians per position), one per pair of channels: `[head_dim / 2]`.
    pub fn rope_frequencies(&self) -> Vec<f32> {
        let half = self.head_dim / 2;
        (0..half)
            .map(|i| {
                let base = f64::from(self.rope_theta).powf(-2.0 * i as f64 / self.head_dim as f64);
                match self.rope_scaling {
                    RopeScaling::None => base as f32,
                    RopeScaling::Linear { factor } => (base / f64::from(factor)) as f32,
                    RopeScaling::Llama3 {
                        factor,
                        low_freq_factor,
                        high_freq_factor,
                        original_context,
                    } => {
                        let wavelength = std::f64::consts::TAU / base;
                        let original = f64::from(original_context);
                        let (low, high) = (f64::from(low_freq_factor), f64::from(high_freq_factor));
                        let scaled = base / f64::from(factor);
                        if wavelength < original / high {
                            base as f32
                        } else if wavelength > original / low {
                            scaled as f32
                        } else {
                            let smooth = (original / wavelength - low) / (high - low);
                            ((1.0 - smooth) * scaled + smooth * base) as f32
                        }
                    }
                }
            })
            .collect()
    }
}
