//! The transformer: one forward for prefill, batched decode and packed training.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Tensor, Var};

use crate::attention::{Plan, SegmentPlan, attention};
use crate::config::Config;
use crate::decode::{LayerWeights, Step};
use crate::dequantise::row_to_f32;
use crate::error::{ModelError, Result};
use crate::kv::KvPool;
use crate::linear::{Linear, lora_delta};
use crate::lora::{LoraAdapter, Target};
use crate::ops::{LogProbs, RopeTable, logprobs, rms_norm, rope, swiglu};
use crate::weights::{WeightSource, WeightView};

/// Where a root segment's keys and values live in a [`KvPool`].
#[derive(Clone, Debug)]
pub struct CacheSlots {
    /// The sequence's blocks, in order.
    pub blocks: Vec<u32>,
    /// Tokens of the sequence that are already computed and stored.
    pub past: usize,
    /// Whether the new tokens' keys and values are stored behind them.
    pub write: bool,
}

/// Some new tokens of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Segment {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// An earlier segment of the batch that this one continues.
    pub parent: Option<usize>,
    /// Cached past; only a segment without a parent may have one.
    pub cache: Option<CacheSlots>,
    /// The adapter its tokens go through; `None` is the base model.
    pub adapter: Option<Arc<LoraAdapter>>,
}

/// A ragged batch: the tokens of all segments lie flat, in order, without padding.
/// Segments form a forest: a token attends to its own segment up to itself, to every
/// token of its ancestors, and to its root's cached past.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The segments, parents before children.
    pub segments: Vec<Segment>,
}

impl Batch {
    /// Tokens in the batch.
    pub fn len(&self) -> usize {
        self.segments.iter().map(|s| s.tokens.len()).sum()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows of every segment in the flat batch.
    pub fn rows(&self) -> Vec<Range<usize>> {
        let mut at = 0;
        self.segments
            .iter()
            .map(|s| {
                let rows = at..at + s.tokens.len();
                at = rows.end;
                rows
            })
            .collect()
    }
}

/// Gradients by PEFT tensor name.
pub type Gradients = BTreeMap<String, Tensor>;

/// How a model is set up.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Compute threads; `None` uses every core.
    pub threads: Option<usize>,
    /// Overrides the file's rope scaling.
    pub rope_scaling: Option<crate::config::RopeScaling>,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Arc<[f32]>,
    mlp_norm: Arc<[f32]>,
    q_norm: Option<Arc<[f32]>>,
    k_norm: Option<Arc<[f32]>>,
    linears: [Arc<Linear>; 7],
}

#[derive(Debug)]
struct Weights {
    config: Config,
    frequencies: Vec<f32>,
    embedding: WeightView,
    layers: Vec<Layer>,
    norm: Arc<[f32]>,
    head: Arc<Linear>,
    pool: rayon::ThreadPool,
    /// Held during a decoding step, which needs all threads of the pool together.
    stepping: Mutex<()>,
}

/// A frozen base model. Cloning shares the weights.
#[derive(Clone, Debug)]
pub struct Model(Arc<Weights>);

/// A run of rows that go through one adapter.
struct Group {
    rows: Range<usize>,
    adapter: Option<Arc<LoraAdapter>>,
}

/// What the layers of one forward share.
struct Context {
    groups: Vec<Group>,
    plan: Arc<Plan>,
    rope: Arc<RopeTable>,
    writes: Vec<(Range<usize>, Vec<Range<usize>>)>,
    tokens: Vec<u32>,
}

impl Context {
    /// Whether an adapter of the batch has variables, whose gradients somebody may want.
    fn is_trained(&self) -> bool {
        self.groups
            .iter()
            .filter_map(|g| g.adapter.as_ref())
            .any(|a| !a.vars().is_empty())
    }
}

impl Model {
    /// Sets a model up from its weights, which stay where the source has them.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than the configuration says.
    pub fn from_source(source: &dyn WeightSource, options: &LoadOptions) -> Result<Self> {
        let mut config = source.config().clone();
        if let Some(scaling) = options.rope_scaling {
            config.rope_scaling = scaling;
        }
        config.check().map_err(ModelError::Invalid)?;
        let matrix = |name: &str, rows: usize, cols: usize| -> Result<WeightView> {
            let view = source
                .tensor(name)?
                .ok_or_else(|| ModelError::MissingTensor(name.to_owned()))?;
            if (view.rows, view.cols) != (rows, cols) {
                return Err(ModelError::Invalid(format!(
                    "{name} is {} × {}, but the configuration needs {rows} × {cols}",
                    view.rows, view.cols
                )));
            }
            Ok(view)
        };
        let vector = |name: &str, len: usize| -> Result<Option<Vec<f32>>> {
            match source.tensor(name)? {
                None => Ok(None),
                Some(view) if view.rows * view.cols == len => Ok(Some(view.to_f32())),
                Some(view) => Err(ModelError::Invalid(format!(
                    "{name} has {} values, but the configuration needs {len}",
                    view.rows * view.cols
                ))),
            }
        };
        let norm = |name: &str, len: usize| -> Result<Arc<[f32]>> {
            vector(name, len)?
                .map(Arc::from)
                .ok_or_else(|| ModelError::MissingTensor(name.to_owned()))
        };
        let mut layers = Vec::with_capacity(config.layers);
        for i in 0..config.layers {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            let mut linears = Vec::with_capacity(7);
            for target in Target::ALL {
                let (rows, cols) = target.shape(&config);
                let weight = matrix(&at(&format!("{}.weight", target.path())), rows, cols)?;
                let bias = vector(&at(&format!("{}.bias", target.path())), rows)?;
                linears.push(Arc::new(Linear::new(weight, bias)));
            }
            let linears = linears
                .try_into()
                .map_err(|_| ModelError::Invalid("a layer has seven linears".into()))?;
            layers.push(Layer {
                attention_norm: norm(&at("input_layernorm.weight"), config.hidden)?,
                mlp_norm: norm(&at("post_attention_layernorm.weight"), config.hidden)?,
                q_norm: vector(&at("self_attn.q_norm.weight"), config.head_dim)?.map(Arc::from),
                k_norm: vector(&at("self_attn.k_norm.weight"), config.head_dim)?.map(Arc::from),
                linears,
            });
        }
        let embedding = matrix("model.embed_tokens.weight", config.vocab, config.hidden)?;
        let head = match source.tensor("lm_head.weight")? {
            Some(_) => matrix("lm_head.weight", config.vocab, config.hidden)?,
            None => embedding.clone(),
        };
        let threads = options
            .threads
            .or_else(|| std::thread::available_parallelism().ok().map(Into::into))
            .unwrap_or(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("compute-{i}"))
            .build()
            .map_err(|e| ModelError::Invalid(format!("no compute threads: {e}")))?;
        Ok(Self(Arc::new(Weights {
            frequencies: config.rope_frequencies(),
            norm: norm("model.norm.weight", config.hidden)?,
            head: Arc::new(Linear::new(head, None)),
            config,
            embedding,
            layers,
            pool,
            stepping: Mutex::new(()),
        })))
    }

    /// The architecture's numbers.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The stored weight of a linear layer.
    pub fn linear(&self, layer: usize, target: Target) -> &WeightView {
        self.0.layers[layer].linears[target as usize].weight()
    }

    /// Parameters of the base model.
    pub fn parameters(&self) -> u64 {
        let w = &*self.0;
        let mut n = w.embedding.rows * w.embedding.cols + w.norm.len();
        if !std::ptr::eq(
            w.head.weight().bytes.as_ref().as_ptr(),
            w.embedding.bytes.as_ref().as_ptr(),
        ) {
            n += w.head.rows() * w.head.cols();
        }
        for layer in &w.layers {
            n += layer.attention_norm.len() + layer.mlp_norm.len();
            n += layer
                .linears
                .iter()
                .map(|l| l.rows() * l.cols())
                .sum::<usize>();
        }
        n as u64
    }

    /// Runs `work` on the model's own compute threads.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.pool.install(work)
    }

    /// Final hidden states `[N, hidden]`, after the last norm. With a pool, cached pasts
    /// are read from it and new keys and values stored as the segments ask.
    ///
    /// # Errors
    /// When the batch is malformed or memory cannot be had.
    pub fn forward(&self, batch: &Batch, pool: Option<&KvPool>) -> Result<Tensor> {
        let context = self.context(batch, pool)?;
        if Step::fits(&context.plan) && !context.is_trained() {
            return self.step(&context, pool);
        }
        self.install(|| {
            let mut x = self.embed(&context.tokens)?;
            for layer in 0..self.0.layers.len() {
                x = self.layer(layer, &x, &context, pool)?;
            }
            Ok(rms_norm(&x, &self.0.norm, self.0.config.norm_eps)?)
        })
    }

    /// [`Self::forward`] for a few sequences with one new token each.
    fn step(&self, context: &Context, pool: Option<&KvPool>) -> Result<Tensor> {
        let w = &*self.0;
        let layers = w.layers.iter().map(|l| LayerWeights {
            attention_norm: &l.attention_norm,
            mlp_norm: &l.mlp_norm,
            q_norm: l.q_norm.as_deref(),
            k_norm: l.k_norm.as_deref(),
            linears: &l.linears,
        });
        let adapters = context
            .groups
            .iter()
            .flat_map(|g| g.rows.clone().map(|_| g.adapter.as_ref()));
        let writes = context
            .writes
            .iter()
            .flat_map(|(rows, runs)| rows.clone().zip(runs.iter().cloned().flatten()));
        let step = Step {
            config: &w.config,
            layers: layers.collect(),
            norm: &w.norm,
            plan: &context.plan,
            rope: &context.rope,
            writes: writes.collect(),
            pool,
            adapters: adapters.collect(),
        };
        let x = self.embed_values(&context.tokens);
        let _alone = w.stepping.lock().unwrap_or_else(PoisonError::into_inner);
        let hidden = self.install(|| step.run(x))?;
        let shape = (context.tokens.len(), w.config.hidden);
        Ok(Tensor::from_vec(hidden, shape, &Device::Cpu)?)
    }

    /// Logits `[m, vocabulary]` of hidden rows `[m, hidden]`.
    ///
    /// # Errors
    /// When the shape does not fit.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.install(|| Ok(self.0.head.forward(hidden)?))
    }

    /// log softmax(logits / temperature) at `targets`, one per hidden row, differentiable
    /// with respect to `hidden`, in chunks.
    ///
    /// # Errors
    /// When shapes do not fit or a target is outside the vocabulary.
    pub fn logprobs(&self, hidden: &Tensor, targets: &[u32], temperature: f32) -> Result<LogProbs> {
        self.install(|| Ok(logprobs(hidden, &self.0.head, targets, temperature)?))
    }

    /// The value of a scalar loss of the final hidden states and its gradients for every
    /// variable of the batch's trainable adapters. Layers are recomputed one by one in
    /// the backward, so only their inputs are kept.
    ///
    /// `loss` receives `[N, hidden]` (after the last norm, tracked) and returns a scalar
    /// tensor plus anything the caller wants back.
    ///
    /// # Errors
    /// When the batch is malformed, the loss fails, or memory cannot be had.
    pub fn value_and_gradients<T: Send>(
        &self,
        batch: &Batch,
        pool: Option<&KvPool>,
        loss: impl FnOnce(&Tensor) -> Result<(Tensor, T)> + Send,
    ) -> Result<(f32, Gradients, T)> {
        self.install(|| {
            let context = self.context(batch, pool)?;
            let layers = self.0.layers.len();
            let mut inputs = Vec::with_capacity(layers);
            let mut x = self.embed(&context.tokens)?;
            for layer in 0..layers {
                inputs.push(x.clone());
                x = self.layer(layer, &x, &context, pool)?.detach();
            }
            let last = Var::from_tensor(&x)?;
            drop(x);
            let hidden = rms_norm(last.as_tensor(), &self.0.norm, self.0.config.norm_eps)?;
            let (value, extra) = loss(&hidden)?;
            let number = value.to_scalar::<f32>()?;
            let mut store = value.backward()?;
            drop((hidden, value));
            let no_path = || ModelError::Invalid("the loss does not depend on the model".into());
            let mut upstream = store.remove(last.as_tensor()).ok_or_else(no_path)?;
            drop((store, last));
            let mut gradients = Gradients::new();
            while let Some(input) = inputs.pop() {
                let layer = inputs.len();
                let input = Var::from_tensor(&input)?;
                let y = self.layer(layer, input.as_tensor(), &context, pool)?;
                let mut store = (y * upstream)?.sum_all()?.backward()?;
                upstream = store.remove(input.as_tensor()).ok_or_else(no_path)?;
                for group in &context.groups {
                    let Some(adapter) = &group.adapter else {
                        continue;
                    };
                    for target in Target::ALL {
                        let Some(pair) = adapter.pair(layer, target) else {
                            continue;
                        };
                        for (matrix, tensor) in [('A', &pair.a), ('B', &pair.b)] {
                            if let Some(gradient) = store.remove(tensor) {
                                gradients.insert(
                                    crate::lora::tensor_name(layer, target, matrix),
                                    gradient,
                                );
                            }
                        }
                    }
                }
            }
            Ok((number, gradients, extra))
        })
    }

    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let shape = (tokens.len(), self.0.config.hidden);
        Ok(Tensor::from_vec(
            self.embed_values(tokens),
            shape,
            &Device::Cpu,
        )?)
    }

    fn embed_values(&self, tokens: &[u32]) -> Vec<f32> {
        let hidden = self.0.config.hidden;
        let mut x = vec![0f32; tokens.len() * hidden];
        for (row, token) in x.chunks_exact_mut(hidden).zip(tokens) {
            row_to_f32(
                self.0.embedding.block,
                self.0.embedding.row(*token as usize),
                row,
            );
        }
        x
    }

    fn context(&self, batch: &Batch, pool: Option<&KvPool>) -> Result<Context> {
        let config = &self.0.config;
        let rows = batch.rows();
        let mut segments: Vec<SegmentPlan> = Vec::with_capacity(rows.len());
        let mut groups: Vec<Group> = Vec::new();
        let mut writes = Vec::new();
        let mut positions = Vec::with_capacity(batch.len());
        let mut tokens = Vec::with_capacity(batch.len());
        let mut starts: Vec<usize> = Vec::with_capacity(rows.len());
        for (i, segment) in batch.segments.iter().enumerate() {
            if let Some(bad) = segment.tokens.iter().find(|t| **t as usize >= config.vocab) {
                return Err(ModelError::Invalid(format!(
                    "token {bad} is outside the vocabulary of {}",
                    config.vocab
                )));
            }
            let (past, ancestors, start) = match (segment.parent, &segment.cache) {
                (Some(parent), None) if parent < i => {
                    let p = &segments[parent];
                    let mut ancestors = p.ancestors.clone();
                    ancestors.push(p.rows.clone());
                    (p.past.clone(), ancestors, starts[parent] + p.rows.len())
                }
                (Some(_), _) => {
                    return Err(ModelError::Invalid(
                        "a parent must be an earlier segment, and only roots have a cache".into(),
                    ));
                }
                (None, None) => (Vec::new(), Vec::new(), 0),
                (None, Some(cache)) => {
                    let pool = pool.ok_or_else(|| {
                        ModelError::Invalid("a cached segment needs a key/value pool".into())
                    })?;
                    let runs = pool.runs(&cache.blocks, 0..cache.past)?;
                    if cache.write {
                        let end = cache.past + segment.tokens.len();
                        writes.push((rows[i].clone(), pool.runs(&cache.blocks, cache.past..end)?));
                    }
                    (runs, Vec::new(), cache.past)
                }
            };
            positions.extend(start..start + rows[i].len());
            tokens.extend_from_slice(&segment.tokens);
            starts.push(start);
            segments.push(SegmentPlan {
                rows: rows[i].clone(),
                past,
                ancestors,
            });
            match groups.last_mut() {
                Some(g) if same(&g.adapter, &segment.adapter) => g.rows.end = rows[i].end,
                _ => groups.push(Group {
                    rows: rows[i].clone(),
                    adapter: segment.adapter.clone(),
                }),
            }
        }
        if tokens.is_empty() {
            return Err(ModelError::Invalid("the batch has no tokens".into()));
        }
        let plan = Plan {
            segments,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let rope = RopeTable::new(&positions, &self.0.frequencies);
        Ok(Context {
            groups,
            plan: Arc::new(plan),
            rope: Arc::new(rope),
            writes,
            tokens,
        })
    }

    /// One linear over all rows; LoRA per run of rows.
    fn linear_forward(
        &self,
        layer: usize,
        target: Target,
        x: &Tensor,
        groups: &[Group],
    ) -> Result<Tensor> {
        let linear = &self.0.layers[layer].linears[target as usize];
        let pair = |g: &Group| {
            g.adapter
                .as_ref()
                .and_then(|a| Some((a.pair(layer, target)?.clone(), a.config().scale())))
        };
        if let [group] = groups {
            return Ok(match pair(group) {
                Some((p, scale)) => linear.forward_lora(x, &p.a, &p.b, scale)?,
                None => linear.forward(x)?,
            });
        }
        let y = linear.forward(x)?;
        if groups.iter().all(|g| pair(g).is_none()) {
            return Ok(y);
        }
        let mut deltas = Vec::with_capacity(groups.len());
        for group in groups {
            let rows = group.rows.len();
            deltas.push(match pair(group) {
                Some((p, scale)) => {
                    lora_delta(&x.narrow(0, group.rows.start, rows)?, &p.a, &p.b, scale)?
                }
                None => Tensor::zeros((rows, linear.rows()), y.dtype(), y.device())?,
            });
        }
        Ok((y + Tensor::cat(&deltas, 0)?)?)
    }

    fn layer(
        &self,
        i: usize,
        x: &Tensor,
        context: &Context,
        pool: Option<&KvPool>,
    ) -> Result<Tensor> {
        let config = &self.0.config;
        let layer = &self.0.layers[i];
        let eps = config.norm_eps;
        let linear = |target, x: &Tensor| self.linear_forward(i, target, x, &context.groups);
        let rows = x.dim(0)?;

        let h = rms_norm(x, &layer.attention_norm, eps)?;
        let head_norm = |t: Tensor, w: &Option<Arc<[f32]>>| -> Result<Tensor> {
            match w {
                None => Ok(t),
                Some(w) => {
                    let width = t.dim(1)?;
                    let heads = t.reshape((rows * width / config.head_dim, config.head_dim))?;
                    Ok(rms_norm(&heads, w, eps)?.reshape((rows, width))?)
                }
            }
        };
        let q = rope(
            &head_norm(linear(Target::Q, &h)?, &layer.q_norm)?,
            &context.rope,
        )?;
        let k = rope(
            &head_norm(linear(Target::K, &h)?, &layer.k_norm)?,
            &context.rope,
        )?;
        let v = linear(Target::V, &h)?;
        if let Some(pool) = pool {
            pool.write(i, &k, &v, &context.writes)?;
        }
        let a = attention(&q, &k, &v, &context.plan, pool.map(|p| &p.layers[i]))?;
        let x = (x + linear(Target::O, &a)?)?;

        let h = rms_norm(&x, &layer.mlp_norm, eps)?;
        let m = swiglu(&linear(Target::Gate, &h)?, &linear(Target::Up, &h)?)?;
        Ok((x + linear(Target::Down, &m)?)?)
    }
}

fn same(a: &Option<Arc<LoraAdapter>>, b: &Option<Arc<LoraAdapter>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    }
}
