//! From a call to an answer: place, generate, record, hand on.
//!
//! Every dialect consumes the same [`Piece`]s. A step is handed to the data pool
//! before [`Piece::Finished`] is handed on; a dropped answer cancels its
//! generation and records nothing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use futures::{Stream, StreamExt};
use serde_json::{Map, Value, json};
use spotter_core::chat::{Message, Role, Tool, ToolCall};
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{
    AdapterChoice, Completion, FinishReason, GenerateEvent, GenerateRequest, Prompt, TokenLogprob,
    ToolCallDelta,
};
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::reward::{Reward, RewardSource};
use spotter_core::step::{Step, StepKind};
use spotter_core::{AdapterVersion, chat};
use tokio::time::{Instant as Tick, timeout, timeout_at};

use crate::App;
use crate::call::{Ask, Call, adapter_choice, call_id, compact, normalise};
use crate::control::dto::{RatingChange, StepSummary};
use crate::control::events::EventBody;
use crate::engine::EventStream;
use crate::feedback;
use crate::metrics;
use crate::pool::{WantedAnswer, answer_key};
use crate::session;
use crate::turn::Place;

/// How long response headers wait for the engine to name the adapter. After that
/// they name the version that is live then.
const HEADER_WAIT: Duration = Duration::from_secs(3);
/// The longest silence on a stream; OpenClaw's watchdog can be as short as 10 s.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The longest token of any vocabulary in use, in bytes: runs of spaces reach it.
const LONGEST_TOKEN: usize = 128;

/// A piece of an answer.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Nothing new, but the client should see a sign of life.
    Waiting,
    /// More text, reasoning or tool-call pieces.
    Delta {
        content: String,
        reasoning: String,
        tool_calls: Vec<ToolCallDelta>,
        logprobs: Vec<TokenLogprob>,
    },
    /// The end; the step is recorded.
    Finished(Box<Finished>),
    /// The end, without an answer.
    Failed(Failure),
}

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) completion: Completion,
    pub(crate) prompt_ids: Vec<u32>,
    pub(crate) prompt_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) adapter: AdapterVersion,
}

impl Finished {
    /// Length of the answer in tokens.
    pub(crate) fn response_tokens(&self) -> u32 {
        u32::try_from(self.completion.response_ids.len()).unwrap_or(u32::MAX)
    }
}

/// The pieces of one answer.
pub(crate) type Pieces = Pin<Box<dyn Stream<Item = Piece> + Send>>;

/// An answer that has begun.
pub(crate) struct Answer {
    pub(crate) step: StepUid,
    pub(crate) trajectory: TrajectoryUid,
    /// The version that answers, as far as it is known.
    pub(crate) adapter: AdapterVersion,
    /// Seconds since the Unix epoch.
    pub(crate) created: i64,
    /// Prompt length, when the engine has told it already.
    pub(crate) prompt_tokens: u32,
    /// How much of it came from the prefix cache.
    pub(crate) cached_tokens: u32,
    pub(crate) pieces: Pieces,
}

impl Answer {
    /// Waits for the end.
    pub(crate) async fn finish(
        mut self,
    ) -> Result<(StepUid, TrajectoryUid, Finished, Vec<TokenLogprob>), Failure> {
        let mut all = Vec::new();
        while let Some(piece) = self.pieces.next().await {
            match piece {
                Piece::Waiting => {}
                Piece::Delta { logprobs, .. } => all.extend(logprobs),
                Piece::Finished(finished) => {
                    return Ok((self.step, self.trajectory, *finished, all));
                }
                Piece::Failed(failure) => return Err(failure),
            }
        }
        Err(cut_off())
    }
}

fn cut_off() -> Failure {
    Failure::new(
        Code::Unavailable,
        "The engine stopped before the answer was complete; nothing was recorded. Try again.",
    )
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

/// The headers that tie an answer to its step.
pub(crate) fn headers(
    step: &StepUid,
    trajectory: &TrajectoryUid,
    adapter: AdapterVersion,
) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let values = [
        ("x-spotter-step", step.to_string()),
        ("x-spotter-trajectory", trajectory.to_string()),
        ("x-spotter-adapter", adapter.to_string()),
    ];
    for (name, value) in values {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    headers
}

/// Begins the answers to a call, one per choice.
///
/// # Errors
/// Whatever the engine refuses within [`HEADER_WAIT`] (so that it becomes an HTTP
/// status), and model names that do not exist.
pub(crate) async fn begin(
    app: &Arc<App>,
    mut call: Call,
    headers: &HeaderMap,
) -> Result<Vec<Answer>, Failure> {
    if call.messages.is_empty() && matches!(call.ask, Ask::Chat) {
        return Err(crate::error::invalid("'messages' is empty."));
    }
    surely_fits(app, &call.messages)?;
    let choice = adapter_choice(&call.model, &app.engine.adapters())?;
    let client = session::client(headers, &call.messages);
    let mut place = app
        .conversations
        .place(app.pool.as_ref(), &call.hints, headers, &call.messages)
        .await?;

    if matches!(call.ask, Ask::Chat) && call.hints.trajectory.is_none() {
        if let Some(change) = typed_feedback(&place) {
            return acknowledge(app, call, place, &change, client).await;
        }
        reported_reaction(app, &mut place).await?;
    }

    let record = Arc::new(Record::of(&mut call));
    call.messages = feedback::without_exchanges(record.messages.clone());
    attach_recorded_ids(app, &place.session, &mut call.messages).await?;
    call.messages = normalise(std::mem::take(&mut call.messages));

    let mut prompt = call.prompt();
    let mut starting = Vec::with_capacity(call.n);
    for number in 0..call.n {
        let mut place = place.clone();
        if call.n > 1 {
            // Choices of one prompt are attempts at it: one group, a trajectory each.
            place.trajectory = TrajectoryUid::new();
            place.index = 0;
        }
        let mut request = GenerateRequest {
            prompt: if number + 1 == call.n {
                std::mem::replace(&mut prompt, Prompt::Tokens(Vec::new()))
            } else {
                prompt.clone()
            },
            tool_choice: call.tool_choice.clone(),
            response_format: call.response_format.clone(),
            sampling: call.sampling.clone(),
            adapter: choice,
            session: place.session.to_string(),
            // A repeated question is a new attempt and gets the version that is live now.
            turn: Some(place.trajectory.to_string()),
            top_logprobs: call.top_logprobs,
            deadline_ms: None,
        };
        if let Some(seed) = request.sampling.seed.as_mut() {
            *seed = seed.wrapping_add(number as u64);
        }
        let recording = Recording {
            app: Arc::clone(app),
            place,
            client: client.clone(),
            request: Arc::clone(&record),
            step: StepUid::new(),
        };
        starting.push(start(recording, request));
    }
    let answers = futures::future::try_join_all(starting).await?;
    app.control.request_seen(&client);
    Ok(answers)
}

/// Refuses megabytes that cannot fit however they are cut into tokens, since counting
/// them exactly would keep everybody else waiting.
fn surely_fits(app: &App, messages: &[Message]) -> Result<(), Failure> {
    let Some(facts) = app.engine.facts() else {
        return Ok(());
    };
    let bytes: usize = messages.iter().map(|m| m.content.len()).sum();
    let least = bytes / LONGEST_TOKEN;
    if least <= facts.context_length as usize {
        return Ok(());
    }
    Err(Failure::new(
        Code::ContextLengthExceeded,
        format!(
            "This model's maximum context length is {} tokens. However, your messages resulted in at least {least} tokens.",
            facts.context_length
        ),
    ))
}

/// What is needed to record an answer when it is complete.
struct Recording {
    app: Arc<App>,
    place: Place,
    client: String,
    request: Arc<Record>,
    step: StepUid,
}

/// The request as it will be stored; made into JSON only when the answer is
/// complete, so that the first token does not wait for it.
struct Record {
    messages: Vec<Message>,
    tools: Vec<Tool>,
    other: Map<String, Value>,
}

impl Record {
    fn of(call: &mut Call) -> Self {
        Self {
            messages: std::mem::take(&mut call.messages),
            tools: call.tools.clone(),
            other: std::mem::take(&mut call.other),
        }
    }

    fn json(&self) -> Value {
        let mut record = self.other.clone();
        record.insert("messages".to_owned(), json!(self.messages));
        record.insert("tools".to_owned(), json!(self.tools));
        Value::Object(record)
    }
}

/// What the engine has said about the prompt.
#[derive(Clone, Default)]
struct Started {
    prompt_ids: Vec<u32>,
    prompt_tokens: u32,
    cached_tokens: u32,
    adapter: AdapterVersion,
}

async fn start(recording: Recording, request: GenerateRequest) -> Result<Answer, Failure> {
    let app = Arc::clone(&recording.app);
    let begun = Instant::now();
    let mut events = match app.engine.generate(request.clone()).await {
        Ok(events) => events,
        Err(failure) => return Err(worded(&app, failure, &request).await),
    };
    let deadline = Tick::now() + HEADER_WAIT;
    let mut started = None;
    let mut first = None;
    while started.is_none() {
        match timeout_at(deadline, events.next()).await {
            Err(_) => break,
            Ok(None) => return Err(cut_off()),
            Ok(Some(GenerateEvent::Failed { failure })) => {
                return Err(worded(&app, failure, &request).await);
            }
            Ok(Some(GenerateEvent::Started {
                prompt_ids,
                prompt_tokens,
                cached_tokens,
                adapter,
            })) => {
                started = Some(Started {
                    prompt_ids,
                    prompt_tokens,
                    cached_tokens,
                    adapter,
                });
            }
            Ok(Some(GenerateEvent::Queued { .. } | GenerateEvent::Prefill { .. })) => {}
            Ok(Some(event)) => {
                first = Some(event);
                break;
            }
        }
    }
    let adapter = match (&started, request.adapter) {
        (Some(started), _) => started.adapter,
        (None, AdapterChoice::Version(version)) => version,
        (None, AdapterChoice::Current) => app.engine.adapters().live,
    };
    let (prompt_tokens, cached_tokens) = started
        .as_ref()
        .map_or((0, 0), |s| (s.prompt_tokens, s.cached_tokens));
    let step = recording.step.clone();
    let trajectory = recording.place.trajectory.clone();
    let started = started.unwrap_or(Started {
        adapter,
        ..Started::default()
    });
    Ok(Answer {
        step,
        trajectory,
        adapter,
        created: now_ms() / 1000,
        prompt_tokens,
        cached_tokens,
        pieces: pieces(recording, request, events, first, started, begun),
    })
}

fn pieces(
    recording: Recording,
    mut request: GenerateRequest,
    mut events: EventStream,
    mut first: Option<GenerateEvent>,
    mut started: Started,
    begun: Instant,
) -> Pieces {
    Box::pin(async_stream::stream! {
        let app = Arc::clone(&recording.app);
        let running = metrics::Running::begin();
        let mut visible = false;
        let mut asked_again = false;
        let mut last_token: Option<Instant> = None;
        loop {
            let event = match first.take() {
                Some(event) => Some(event),
                None => match timeout(HEARTBEAT, events.next()).await {
                    Ok(event) => event,
                    Err(_) => {
                        yield Piece::Waiting;
                        continue;
                    }
                },
            };
            match event {
                Some(GenerateEvent::Queued { .. } | GenerateEvent::Prefill { .. }) => {
                    // Progress events may come faster than the heartbeat is due, and
                    // must not postpone it.
                    if last_token.is_none() && running.heartbeat_due(HEARTBEAT) {
                        yield Piece::Waiting;
                    }
                }
                Some(GenerateEvent::Started { prompt_ids, prompt_tokens, cached_tokens, adapter }) => {
                    started = Started { prompt_ids, prompt_tokens, cached_tokens, adapter };
                }
                Some(GenerateEvent::Delta { content, reasoning, tool_calls, logprobs }) => {
                    let now = Instant::now();
                    match last_token.replace(now) {
                        None => metrics::first_token(now - begun),
                        Some(last) => metrics::inter_token(now - last),
                    }
                    visible |= !content.trim().is_empty() || !tool_calls.is_empty();
                    let tool_calls = tool_calls.into_iter().map(|mut delta| {
                        delta.id = delta.id.map(|id| call_id(&id));
                        delta
                    }).collect();
                    yield Piece::Delta { content, reasoning, tool_calls, logprobs };
                }
                Some(GenerateEvent::Finished { completion }) => {
                    let completion = tidy(*completion);
                    let empty = completion.content.trim().is_empty() && completion.tool_calls.is_empty();
                    let sampled = request.sampling.temperature > 0.0;
                    if empty && !visible && !asked_again && sampled
                        && completion.finish_reason == FinishReason::Stop
                        && recording.place.kind == StepKind::Main
                    {
                        asked_again = true;
                        if let Some(seed) = request.sampling.seed.as_mut() {
                            *seed = seed.wrapping_add(0x5eed);
                        }
                        if let Ok(again) = app.engine.generate(request.clone()).await {
                            events = again;
                            continue;
                        }
                    }
                    let finished = Finished {
                        completion,
                        prompt_ids: std::mem::take(&mut started.prompt_ids),
                        prompt_tokens: started.prompt_tokens,
                        cached_tokens: started.cached_tokens,
                        adapter: started.adapter,
                    };
                    metrics::tokens(finished.prompt_tokens, finished.cached_tokens, finished.response_tokens());
                    recording.store(&request, &finished).await;
                    running.ended();
                    yield Piece::Finished(Box::new(finished));
                    return;
                }
                Some(GenerateEvent::Failed { failure }) => {
                    running.ended();
                    yield Piece::Failed(worded(&app, failure, &request).await);
                    return;
                }
                None => {
                    running.ended();
                    yield Piece::Failed(cut_off());
                    return;
                }
            }
        }
    })
}

/// Holds what every client relies on: ids of letters and digits, compact
/// arguments, and `tool_calls` as the reason whenever there are calls.
fn tidy(mut completion: Completion) -> Completion {
    for call in &mut completion.tool_calls {
        call.id = call_id(&call.id);
        call.arguments = compact(&call.arguments);
    }
    if !completion.tool_calls.is_empty() {
        completion.finish_reason = FinishReason::ToolCalls;
    } else if completion.finish_reason == FinishReason::ToolCalls {
        completion.finish_reason = FinishReason::Stop;
    }
    completion
}

/// The answer as one assistant message.
pub(crate) fn assistant_message(completion: &Completion) -> Message {
    Message {
        reasoning: completion.reasoning.clone(),
        tool_calls: completion.tool_calls.clone(),
        ..Message::text(Role::Assistant, completion.content.clone())
    }
}

impl Recording {
    /// Hands the step to the data pool. A failure to store is reported and
    /// counted, and the client still gets its answer.
    async fn store(&self, request: &GenerateRequest, finished: &Finished) {
        if !self.app.control.recording() {
            metrics::step_dropped("paused");
            return;
        }
        let completion = &finished.completion;
        let message = assistant_message(completion);
        let step = Step {
            uid: self.step.clone(),
            session: self.place.session.clone(),
            trajectory: self.place.trajectory.clone(),
            prompt_uid: self.place.prompt_uid.clone(),
            turn: self.place.turn.clone(),
            index: self.place.index,
            kind: self.place.kind,
            kind_reason: self.place.kind_reason.clone(),
            adapter: finished.adapter,
            base_model: self.app.engine.facts().map(|f| f.name).unwrap_or_default(),
            prompt_ids: finished.prompt_ids.clone(),
            response_ids: completion.response_ids.clone(),
            logprobs: completion.logprobs.clone(),
            model_logprobs: completion.model_logprobs.clone(),
            sampling: request.sampling.clone(),
            finish_reason: completion.finish_reason,
            cached_tokens: finished.cached_tokens,
            first_token_ms: completion.first_token_ms,
            total_ms: completion.total_ms,
            client: self.client.clone(),
            user_text: self.place.user_text.clone(),
            answer_text: completion.content.clone(),
            request: self.request.json(),
            response: serde_json::to_value(message).unwrap_or(Value::Null),
            created_at: now_ms(),
        };
        let summary = summary(&step, finished.prompt_tokens);
        match self.app.pool.append(step).await {
            Ok(()) => {
                metrics::step_stored();
                let key = message_key(&completion.content, &completion.tool_calls);
                self.app.conversations.commit(
                    &self.place,
                    &self.step,
                    (key, completion.response_ids.clone()),
                );
                self.app.events.publish(EventBody::Step {
                    step: Box::new(summary),
                });
            }
            Err(failure) => {
                metrics::step_dropped(failure.code.as_str());
                tracing::error!(step = %self.step, %failure, "an answer was given but not recorded");
                self.app.events.publish(EventBody::Alert {
                    level: "error".to_owned(),
                    code: failure.code.as_str().to_owned(),
                    message: "An answer was given but could not be recorded.".to_owned(),
                });
            }
        }
    }
}

/// A fresh step as lists show it; its turn's number is the data pool's to know.
fn summary(step: &Step, prompt_tokens: u32) -> StepSummary {
    StepSummary {
        uid: step.uid.to_string(),
        session: step.session.to_string(),
        trajectory: step.trajectory.to_string(),
        turn: 0,
        kind: kind_name(step.kind).to_owned(),
        kind_reason: step.kind_reason.clone(),
        adapter: step.adapter.to_string(),
        client: step.client.clone(),
        user_text: step.user_text.clone(),
        answer_text: step.answer_text.clone(),
        rating: None,
        reward: None,
        reasons: Vec::new(),
        note: None,
        correction: None,
        used_in_run: None,
        dropped_reason: None,
        in_next_lesson: false,
        finish_reason: finish_name(step.finish_reason).to_owned(),
        prompt_tokens,
        response_tokens: u32::try_from(step.response_ids.len()).unwrap_or(u32::MAX),
        created_at: step.created_at,
    }
}

/// `main` or `side`.
pub(crate) fn kind_name(kind: StepKind) -> &'static str {
    match kind {
        StepKind::Main => "main",
        StepKind::Side => "side",
    }
}

/// OpenAI's name of a finish reason.
pub(crate) fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}

fn explain(app: &App, failure: Failure) -> Failure {
    match (failure.code, app.engine.facts()) {
        (Code::ContextLengthExceeded, Some(facts))
            if !failure.message.contains("maximum context length") =>
        {
            Failure::new(
                failure.code,
                format!(
                    "This model's maximum context length is {} tokens. {}",
                    facts.context_length, failure.message
                ),
            )
        }
        _ => failure,
    }
}

/// Gives an overflow the wording that clients recognise and compact upon.
async fn worded(app: &App, failure: Failure, request: &GenerateRequest) -> Failure {
    if failure.code != Code::ContextLengthExceeded
        || failure
            .message
            .starts_with("This model's maximum context length is")
    {
        return failure;
    }
    let facts = app.engine.facts();
    let count = app.engine.count_tokens(request.prompt.clone()).await;
    match (facts, count) {
        (Some(facts), Ok(count)) => Failure::new(
            failure.code,
            format!(
                "This model's maximum context length is {} tokens. However, your messages resulted in {count} tokens.",
                facts.context_length
            ),
        ),
        _ => explain(app, failure),
    }
}

/// Reuses the sampled ids of earlier answers, so that re-rendered history is the
/// token sequence that was generated.
async fn attach_recorded_ids(
    app: &App,
    session: &SessionUid,
    messages: &mut [Message],
) -> Result<(), Failure> {
    let mut wanted: Vec<(usize, WantedAnswer)> = Vec::new();
    for (at, message) in messages.iter_mut().enumerate() {
        if message.role != Role::Assistant {
            continue;
        }
        let key = message_key(&message.content, &message.tool_calls);
        // Recent answers are remembered, tool calls included; older ones are looked up.
        message.token_ids = app.conversations.answer(session, &key);
        if message.token_ids.is_none() {
            wanted.push((
                at,
                WantedAnswer {
                    key,
                    content: message.content.clone(),
                    calls_tools: !message.tool_calls.is_empty(),
                },
            ));
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let asked: Vec<WantedAnswer> = wanted.iter().map(|(_, answer)| answer.clone()).collect();
    let recorded = app.pool.recorded_answers(session, &asked).await?;
    for (at, answer) in wanted {
        let found = recorded.iter().find(|r| r.key == answer.key);
        messages[at].token_ids = found.map(|r| r.ids.clone());
    }
    Ok(())
}

/// [`answer_key`] of a message.
pub(crate) fn message_key(content: &str, calls: &[ToolCall]) -> String {
    answer_key(
        content,
        calls
            .iter()
            .map(|c| (c.name.as_str(), c.arguments.as_str())),
    )
}

/// A rating as a reward of the person.
pub(crate) fn user_reward(change: &RatingChange) -> Reward {
    Reward {
        value: change.rating.map(crate::control::dto::Rating::value),
        source: RewardSource::User,
        reasons: change.reasons.clone(),
        note: change.note.clone(),
        correction: change.correction.clone(),
        created_at: now_ms(),
    }
}

/// Feedback that is the whole message, and the answer it is about.
fn typed_feedback(place: &Place) -> Option<(StepUid, RatingChange)> {
    let change = feedback::parse(&place.user_text)?;
    Some((place.previous.clone()?, change))
}

async fn rate(app: &App, uid: &StepUid, change: &RatingChange) -> Result<(), Failure> {
    if let Some(step) = app.pool.rate(uid, user_reward(change)).await? {
        app.events.publish(EventBody::Rating {
            step: Box::new(step),
        });
    }
    Ok(())
}

/// Takes a channel's reaction out of the person's words and counts it once.
async fn reported_reaction(app: &App, place: &mut Place) -> Result<(), Failure> {
    let Some((rating, rest)) = feedback::reported_reaction(&place.user_text) else {
        return Ok(());
    };
    if let (true, Some(previous)) = (place.opens_turn, &place.previous) {
        let change = RatingChange {
            rating: Some(rating),
            note: Some("reaction in a channel".to_owned()),
            ..RatingChange::default()
        };
        rate(app, previous, &change).await?;
    }
    if rest.is_empty() {
        place.kind = StepKind::Side;
        place.kind_reason = "a channel reports a reaction".to_owned();
    }
    place.user_text = rest;
    Ok(())
}

/// Rates the previous answer and answers with one line, which is recorded as a
/// side step and never trained.
async fn acknowledge(
    app: &Arc<App>,
    mut call: Call,
    mut place: Place,
    (previous, change): &(StepUid, RatingChange),
    client: String,
) -> Result<Vec<Answer>, Failure> {
    rate(app, previous, change).await?;
    place.kind = StepKind::Side;
    place.kind_reason = "feedback typed into the chat".to_owned();
    place.trajectory = TrajectoryUid::new();
    place.index = 0;
    let content = feedback::acknowledgement(change);
    let adapter = app.engine.adapters().live;
    let recording = Recording {
        app: Arc::clone(app),
        place,
        client,
        request: Arc::new(Record::of(&mut call)),
        step: StepUid::new(),
    };
    let request = GenerateRequest {
        prompt: Prompt::Tokens(Vec::new()),
        tool_choice: chat::ToolChoice::None,
        response_format: chat::ResponseFormat::Text,
        sampling: call.sampling.clone(),
        adapter: AdapterChoice::Current,
        session: recording.place.session.to_string(),
        turn: None,
        top_logprobs: None,
        deadline_ms: None,
    };
    let step = recording.step.clone();
    let trajectory = recording.place.trajectory.clone();
    let pieces: Pieces = Box::pin(async_stream::stream! {
        let finished = Finished {
            completion: Completion {
                content: content.clone(),
                reasoning: None,
                tool_calls: Vec::new(),
                finish_reason: FinishReason::Stop,
                response_ids: Vec::new(),
                logprobs: Vec::new(),
                model_logprobs: Vec::new(),
                first_token_ms: 0,
                total_ms: 0,
            },
            prompt_ids: Vec::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            adapter,
        };
        recording.store(&request, &finished).await;
        yield Piece::Delta {
            content,
            reasoning: String::new(),
            tool_calls: Vec::new(),
            logprobs: Vec::new(),
        };
        yield Piece::Finished(Box::new(finished));
    });
    Ok(vec![Answer {
        step,
        trajectory,
        adapter,
        created: now_ms() / 1000,
        prompt_tokens: 0,
        cached_tokens: 0,
        pieces,
    }])
}
