//! TLS to servers: whom this process trusts, and who it says that it is.

use crate::error::{Error, Kind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What people give: files of PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Who signs the servers' certificates; None: whoever this machine trusts.
    pub ca: Option<PathBuf>,
    /// Our certificate, for servers that ask for one.
    pub cert: Option<PathBuf>,
    /// The key of that; None: it is in the same file.
    pub key: Option<PathBuf>,
}

/// The same, read.
#[derive(Clone)]
pub struct Tls {
    files: Files,
    config: Arc<ClientConfig>,
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        self.files == other.files
    }
}

impl Eq for Tls {}

impl Tls {
    /// Reads the files: what is wrong with them is told now, and not as trouble of a server.
    pub(super) fn new(files: Files) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(format!("TLS cannot be used: {error}")))?
            .with_root_certificates(roots(files.ca.as_deref())?);
        let mut config = match (&files.cert, &files.key) {
            (None, None) => builder.with_no_client_auth(),
            (None, Some(_)) => {
                return Err(wrong("key= of the cluster is given without cert=; give both".into()));
            }
            (Some(cert), key) => {
                let chain = certificates("cert", cert)?;
                let path = key.as_deref().unwrap_or(cert);
                let key = PrivateKeyDer::from_pem_file(path)
                    .map_err(|error| unread("key", path, &error))?;
                let with = builder.with_client_auth_cert(chain, key);
                with.map_err(|error| unread("cert", cert, &error))?
            }
        };
        // Kept sessions have a lock, which a fork in another thread could leave locked for ever.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { files, config: Arc::new(config) })
    }

    /// The beginning of a session with this server, by the name or number that people gave.
    pub(super) fn session(&self, host: &str) -> std::result::Result<ClientConnection, String> {
        let name = ServerName::try_from(host.to_string()).map_err(|error| error.to_string())?;
        ClientConnection::new(Arc::clone(&self.config), name).map_err(|error| error.to_string())
    }
}

fn roots(ca: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = ca {
        for certificate in certificates("ca", path)? {
            roots.add(certificate).map_err(|error| unread("ca", path, &error))?;
        }
        return Ok(roots);
    }
    // Some that nobody can read are normal; none at all is not.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(wrong(
            "this machine has no list of whom to trust; install ca-certificates, or give the file \
             of who signed the servers' certificates: rediss://host:port?ca=/path/ca.pem"
                .into(),
        ));
    }
    Ok(roots)
}

fn certificates(what: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let all = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<std::result::Result<Vec<_>, rustls::pki_types::pem::Error>>);
    match all {
        Ok(all) if all.is_empty() => Err(unread(what, path, &"there is no certificate in it")),
        Ok(all) => Ok(all),
        Err(error) => Err(unread(what, path, &error)),
    }
}

fn unread(what: &str, path: &Path, why: &dyn Display) -> Error {
    wrong(format!(
        "{what}={} of the cluster is not used: {why}; give a file of PEM",
        path.display()
    ))
}

fn wrong(message: String) -> Error {
    Error::new(Kind::Argument, message)
}

/// Somebody who signs, for tests; a file of this process.
#[cfg(test)]
pub(super) fn signer(name: &str) -> PathBuf {
    const PEM: &str = "\
-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUL/ikxj3b3QUInbGNQXD7XWAscWkwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJb2YgYSB0ZXN0MCAXDTI2MTExODIwMzMxN1oYDzIxMjYxMDI1
MjAzMzE3WjAUMRIwEAYDVQQDDAlvZiBhIHRlc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARXJ8R+xuVffTbW3395Q/4eIVDKIWjF9Uj0qaffTi+m+xAjfdbr/B6h
l03e7uMnC1Ldjj5RKmTNEtbL7T8DWotLo1MwUTAdBgNVHQ4EFgQU/oFTBWULbkfp
euysjsD9Ntgfpp4wHwYDVR0jBBgwFoAU/oFTBWULbkfpeuysjsD9Ntgfpp4wDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiBQVLbR7dIm0QI6jerJ9NqS
YDWL30/u/kpQLGPHMIItNwIhAK+QZCFKgEAXvit4Zumi5iUKw1D2xKgGNxVkPE10
GDm+
-----END CERTIFICATE-----
";
    let path = std::env::temp_dir().join(format!("stocache-{name}-{}.pem", std::process::id()));
    std::fs::write(&path, PEM).unwrap();
    path
}
